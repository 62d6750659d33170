"""Initialisations for depth and width: carried out in the first stage, with the norm of the gradient of each
layer before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs
from effcompile.runs.carry import Origins
from effcompile.runs.fields.base import Effect
from effcompile.runs.fields.values import StageValues
from effcompile.runs.initialise import RECIPES, mup_rates

if TYPE_CHECKING:
    from collections.abc import Sequence


class Init(Effect):
    """`init`: how the first stage begins."""

    name: ClassVar[str] = "init"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        if stage.init not in RECIPES:
            raise UsageError(f"Stage(init={stage.init!r}): one of {', '.join(map(repr, RECIPES))} is wanted.")

    @classmethod
    def check_order(cls, stages: Sequence[StageValues]) -> None:
        late = [number for number, stage in enumerate(stages) if number and stage.init is not None]
        if late:
            raise UsageError(
                f"Stage {late[0] + 1} has init={stages[late[0]].init!r}: only the first stage begins with "
                "untrained weights."
            )

    def change(self, model: nn.Module, example: Example) -> Origins:
        before = gradient_norms(model, self.layers, example)
        origins = RECIPES[self.value](model, self.layers)
        after = gradient_norms(model, self.layers, example)
        told = f": gradient norm by layer {_listed(before)} → {_listed(after)}" if before and after else ""
        self.notes.append(f"init {self.value!r}{told}")
        return origins

    def rates(self, model: nn.Module) -> Mapping[str, float]:
        return mup_rates(model, self.layers) if self.value == "mup" else {}


def gradient_norms(model: nn.Module, layers: str, example: Example) -> list[float]:
    """The norm of the gradient of each layer's parameters at the example inputs; none on the meta device or
    without a loss.
    """
    if any(p.is_meta for p in model.parameters()):
        return []
    args, kwargs = as_inputs(example)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        outputs = model(*args, **kwargs)
        loss = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
        if loss is None or loss.dim():
            return []
        stack = model.get_submodule(layers).children()
        groups = [[p for p in layer.parameters() if p.requires_grad] for layer in stack]
        flat = [p for group in groups for p in group]
        found = dict(zip(map(id, flat), torch.autograd.grad(loss, flat, allow_unused=True), strict=True))
    squared: Callable[[nn.Parameter], float] = lambda p: (  # noqa: E731
        0.0 if (g := found[id(p)]) is None else float(g.double().square().sum())
    )
    return [sum(map(squared, group)) ** 0.5 for group in groups]


def _listed(norms: list[float]) -> str:
    """All of a few; of many the first, the middle and the last."""
    shown = norms if len(norms) <= 4 else [norms[0], norms[len(norms) // 2], norms[-1]]
    return " ".join(f"{norm:.2g}" for norm in shown)
