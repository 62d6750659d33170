"""The step as the model writes it, and the same with its attentions fused: both are captured, for both may be planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture import capture_training
from effcompile.capture.training_graph import WRAPPED
from effcompile.core.cost import Cost
from effcompile.core.torch_compat import is_fake
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.step import Step
from effcompile.passes.training.fused_attention import Attended, FusedAttention

WRITTEN, FUSED = "as written", "fused"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """step: as written; fused: with its attentions one operator each, None where nothing is to be fused; attended: which, and why not.

    narrow: the same in 16 bits; refused: the dtypes that it is not in, with reasons (precision.py).
    """

    step: Step
    fused: Step | None = None
    attended: Attended = field(default_factory=Attended)
    narrow: Narrow | None = None
    refused: tuple[Declined, ...] = ()

    def forms(self, attention: FusedAttention | None) -> Forms:
        """What may be planned."""
        narrow = None if self.narrow is None else replace(self.narrow, forms=self.narrow.captured.forms(attention))
        return Forms(fused=self.fused, only=attention is not None and attention.always, narrow=narrow)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """fused: the step with its attentions fused, None for none. only: the step as written is no alternative to it. narrow: in 16 bits."""

    fused: Step | None = None
    only: bool = False
    narrow: Narrow | None = None


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """The step in 16 bits. dtype: of passes.precision.DTYPES. only: the one in fp32 is no alternative to it. forms: what may be planned."""

    dtype: str
    captured: Captured
    only: bool = False
    forms: Forms = field(default_factory=Forms)


#: The step as written and nothing else.
AS_WRITTEN = Forms()


def captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any, Any], torch.Tensor] | None,
    keep_outputs: bool, attention: FusedAttention | None, capture: Callable[..., Step] = capture_training,
) -> Captured:  # fmt: skip
    """Capture a step by `capture`, twice where that may pay. Arguments and what is raised as in `capture_training`.

    Masks are understood by their values, so that a model without data (on the meta device) stays as it is written.
    """
    promises: list[bool] = []
    left: dict[str, str] = {}
    made: list[Attended] = []

    def look(front: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        if attention is not None:
            promises.append(attention.promises(front))
            left.update(attention.refused(front))

    def fuse(front: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        assert attention is not None
        made.append(attention.fuse(front, inputs))

    step = capture(model, args, kwargs, loss=loss, keep_outputs=keep_outputs, edit=look)
    if not any(promises):
        return Captured(step=step, attended=_in_the_users_names(Attended(left=left), step))
    if _without_data(model, step):
        return Captured(step=step, attended=Attended(left={"attention": "its mask has no values to look at: this is the meta device"}))
    fused = capture(model, args, kwargs, loss=loss, keep_outputs=keep_outputs, edit=fuse)
    attended = _in_the_users_names(made[-1], step) if made else Attended()
    return Captured(step=step, fused=fused if attended.fused else None, attended=attended)


def _without_data(model: nn.Module, step: Step) -> bool:
    given = [leaf for leaf in step.leaves(step.args, step.kwargs or {}) if isinstance(leaf, torch.Tensor)]
    return any(is_fake(tensor) for tensor in (*model.parameters(), *model.buffers(), *given))


def decisions(attended: Attended, *, fused: bool) -> list[Decision]:
    """What became of every attention that can be one operator."""
    return [
        Decision(
            site=site, kind="attention", option=FUSED if fused else WRITTEN, baseline=WRITTEN, by="attention", cost=Cost(),
            baseline_cost=Cost(bytes_kept=attended.score_bytes[site]),
            why=f"its scores, {format_bytes(attended.score_bytes[site])}, are never whole" if fused else "no faster here",
            note=f"sees {text}",
        )
        for site, text in attended.fused.items()
    ]  # fmt: skip


def refusals(attended: Attended) -> list[Declined]:
    """The attentions that stay as they are."""
    return [Declined(site=s, kind="attention", option=FUSED, by="attention", reason=reason) for s, reason in attended.left.items()]


def input_names(step: Step) -> list[str]:
    """The user's name of each of the step's inputs, in their order: `input_ids`, `0`."""
    given, _ = pytree.tree_flatten_with_path((step.args, dict(step.kwargs or {})))
    names: dict[int, list[str]] = {}
    for path, leaf in given:
        names.setdefault(id(leaf), []).append(pytree.keystr(path[1:]).strip("[]'"))
    leaves = step.leaves(step.args, step.kwargs or {})
    return [(names.get(id(leaf)) or [node.name]).pop(0) for node, leaf in zip(step.inputs, leaves, strict=True)]  # one may be given twice


def _in_the_users_names(attended: Attended, step: Step) -> Attended:
    """Modules without the wrapper around the model, inputs by the names that the user gives them."""
    inputs = {f"tensors_{index}": name for index, name in enumerate(input_names(step))}

    def site(name: str) -> str:
        return name.removeprefix(f"{WRAPPED}.")

    def text(words: str) -> str:
        return re.sub(r"tensors_\d+", lambda found: inputs.get(found[0], found[0]), words)

    return replace(
        attended,
        fused={site(s): text(words) for s, words in attended.fused.items()},
        score_bytes={site(s): size for s, size in attended.score_bytes.items()},
        left={site(s): text(reason) for s, reason in attended.left.items()},
    )
