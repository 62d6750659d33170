"""Frozen weights held as codes: the base of LoRA and its kin in 8 or 4 bits (QLoRA, Dettmers et al. 2023,
arXiv 2305.14314).

What is not trained is read by products alone, in the forward and once more for the gradient of its input.
Each of these reads writes the weight out first (ops/frozen_codes.py), so that no more than one is there as it
was given; the time of writing it out is an operator's like any other, and the bytes that are freed the
schedule may spend on activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from effcompile.core import gpu
from effcompile.core.errors import FormatError, UnknownNameError, UsageError
from effcompile.core.reasons import Because, Unsupported
from effcompile.core.torch_compat import is_fake
from effcompile.ir.plan import Declined, Plan
from effcompile.ir.resident import storage_bytes
from effcompile.ir.roles import Entering, Enters
from effcompile.ir.step import Step
from effcompile.ops.frozen_codes import FORMS, GROUP, packed_bytes, rounding_of
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.passes.training.step_edit import call, copied

aten, ours = torch.ops.aten, torch.ops.effcompile

SITE, KIND = "frozen weights", "frozen weights"
BASELINE = "as given"
#: Products of matrices → which of their arguments a weight may be.
_PRODUCTS: Mapping[object, tuple[int, ...]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1),
    ours.wide_mm.default: (0, 1), ours.wide_addmm.default: (1, 2),
}  # fmt: skip
#: What may stand between a weight and a product.
_BETWEEN = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
)
#: Weights with fewer elements stay: they are of no weight.
_LEAST = 4096
_HELD = (
    "{} frozen weights are held in {name} in the model itself from then on: load its base anew to "
    "have them as they were"
)
#: Weights whose rounding is looked at, spread over the model.
_SAMPLED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Not exact: proposed only where the goal allows an error, which is measured against the step with the
    weights as given.

    `forms`: what they may be held in: int8 or nf4. One whose rounding of the weights alone is above the
    goal's error is not proposed.
    `as_given`: whether they may stay as they are where there is a form within the goal's error.
    """

    forms: tuple[str, ...] = tuple(FORMS)
    as_given: bool = True

    name: ClassVar[str] = "frozen"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for form in self.forms:
            if form not in FORMS:
                raise UnknownNameError("form of frozen weights", form, FORMS)
        if not self.forms:
            raise UsageError(
                f"frozen.forms is empty. Choose among {', '.join(FORMS)}, or leave the pass out: no-frozen."
            )

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The weights as given, and in each form; nothing of a step without frozen weights."""
        found = frozen_weights(case.step)
        if not found:
            return
        refused = partial(Declined, site=SITE, kind=KIND, by=self.name)
        if case.source is None or case.step.spread is not None:
            yield refused(
                option="codes",
                reason=Unsupported(
                    "on ranks, and within a graph that torch.compile cut out, they stay as given"
                ),
            )
            return
        given = {name: p for name, p in case.source.model.named_parameters() if name in set(found.values())}
        known = [p for p in given.values() if not is_fake(p) and not p.is_meta]
        options = [StepOption(name=BASELINE)] * self.as_given
        for form in self.forms:
            rounding = rounding_of(known[:: max(1, len(known) // _SAMPLED)], form)
            if rounding > context.goal.tolerance:
                text = (
                    "it rounds the weights by {error}"
                    + " (of normal ones)" * (not known)
                    + ", the goal allows {error}"
                )
                yield refused(option=form, reason=Unsupported(text, (rounding, context.goal.tolerance)))
                continue
            note = "{} weights, rounded by {error}" + (
                "" if context.here else "; the gradients' error is unmeasured"
            )
            options.append(
                StepOption(name=form, settings={"form": form}, note=Because(note, (len(found), rounding)))
            )
        if any(option.name != BASELINE for option in options):
            settled = not self.as_given
            yield StepChoice(site=SITE, kind=KIND, baseline=BASELINE, options=tuple(options), settled=settled)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step whose products read the weights from codes.

        Raises:
            FormatError: a form that there is none of, from a saved plan, or a step without a model.
        """
        form = option.setting("form", str)
        if form not in FORMS or case.source is None:
            raise FormatError(
                f"The plan holds frozen weights as {form!r}, which this step cannot have "
                f"({', '.join(FORMS)}). Plan again."
            )
        step = coded(case.step, dict(case.source.model.named_parameters(remove_duplicate=False)), form)
        return replace(case, step=step, notes=(*case.notes, Because(_HELD, (len(step.coded), form))))


def form_in(plan: Plan) -> str | None:
    """What a plan holds frozen weights in; None where they stay as given.

    Raises:
        FormatError: something that there is none of.
    """
    found = next((d for d in plan.decisions if d.kind == KIND), None)
    if found is None or found.option == BASELINE:
        return None
    if found.option not in FORMS:
        raise FormatError(
            f"The plan holds frozen weights as {found.option!r}; {', '.join(FORMS)} are known. Plan again."
        )
    return found.option


def frozen_weights(step: Step) -> dict[fx.Node, str]:
    """The placeholders of matrices that are not trained and that products alone read → their names."""
    trained = {*step.differentiated, *step.consumed}
    return {
        node: name
        for node, name in step.parameters.items()
        if name not in trained and _large(node) and _read_by_products(node)
    }


def _large(node: fx.Node) -> bool:
    value = node.meta["val"]
    count = int(value.numel())
    return (
        value.dim() == 2
        and value.is_floating_point()
        and value.dtype != torch.float64
        and count >= _LEAST
        and count % GROUP == 0
    )


def _read_by_products(node: fx.Node) -> bool:
    return bool(node.users) and all(
        _read_by_products(user)
        if is_between(user)
        else any(user.args[i] is node for i in _PRODUCTS.get(user.target, ()))
        for user in node.users
    )


def is_between(node: fx.Node) -> bool:
    """A view of a matrix, or its cast to a narrower dtype."""
    return node.target in _BETWEEN and not (node.kwargs.keys() - {"dtype"})


def coded(step: Step, parameters: Mapping[str, torch.Tensor], form: str) -> Step:
    """A copy of the step that reads its frozen weights as codes.

    `parameters`: of the model, by every name.
    """
    step, _ = copied(step)
    found = frozen_weights(step)
    for node in found:
        _expand_where_read(step.graph, node, form)
    step.graph.lint()
    step.module.recompile()
    entering = {
        node: Enters(Entering.CODES, found[node]) if node in found else entry
        for node, entry in step.roles.entering.items()
    }
    return replace(
        step,
        roles=replace(step.roles, entering=entering),
        coded={**step.coded, **dict.fromkeys(found.values(), form)},
        resident_bytes=_resident(step, parameters, found),
    )


def _resident(step: Step, parameters: Mapping[str, torch.Tensor], found: Mapping[fx.Node, str]) -> int | None:
    """Bytes before the step: without the weights as they were given, but for memory that others show."""
    if step.resident_bytes is None:
        return None
    gone = {id(parameters[name]) for name in found.values()}
    saved = storage_bytes(parameters.values()) - storage_bytes(
        p for p in parameters.values() if id(p) not in gone
    )
    sizes = [int(node.meta["val"].numel()) for node in found]
    on_device = any(node.meta["val"].device.type == "cuda" for node in found)
    return step.resident_bytes - saved + sum(map(gpu.rounded, sizes) if on_device else sizes)


def _expand_where_read(graph: fx.Graph, weight: fx.Node, form: str) -> None:
    """The placeholder becomes that of the codes, and each product has the weight written out
    right before it.
    """
    given = weight.meta["val"]
    reads = list(_reads(weight, ()))
    weight.meta["val"] = given.new_empty(packed_bytes(given.numel(), form), dtype=torch.uint8)
    for product, place, path in reads:
        dtype = next(
            (node.meta["val"].dtype for node in reversed(path) if node.target is aten._to_copy.default),
            given.dtype,
        )
        with graph.inserting_before(product):
            made = call(graph, product, ours.expand_codes.default, weight, list(given.shape), form, dtype)
            for node in path:
                if node.target is not aten._to_copy.default:
                    made = call(graph, product, node.target, made, *node.args[1:])  # type: ignore[arg-type]
        product.update_arg(place, made)
    for node in reversed(list(graph.nodes)):
        if not node.users and any(node in path for _, _, path in reads):
            graph.erase_node(node)


def _reads(node: fx.Node, path: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, int, tuple[fx.Node, ...]]]:
    """(A product, which of its arguments, what stands between) of every read of a weight."""
    for user in list(node.users):
        if is_between(user):
            yield from _reads(user, (*path, user))
        else:
            yield from ((user, place, path) for place in _PRODUCTS[user.target] if user.args[place] is node)
