"""Gradients of a value's parts, summed where the whole gradient lies: what a loop over x[:, 0], x[:, 1], ...
leaves in the backward.

Autograd pads each part's gradient to the whole with zeros and adds the T of them in new tensors: of one size
with the whole there are the sum so far, the padded part and the new sum at once, and T of each are written.
In place there is the sum alone. A scan over 64 tokens (mamba in PyTorch, batch 8) needed 1.11 of eager's peak
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.reasons import Because
from effcompile.ir.plan import Decision
from effcompile.ir.step import Step
from effcompile.ops.parts import add_select_, add_slice_
from effcompile.passes.training.accumulate import is_free, is_sum
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption, StepOutcome
from effcompile.passes.training.step_edit import call, copied

aten = torch.ops.aten

KIND, PADDED, IN_PLACE = "gradients of parts", "padded", "in place"
#: aten's padding of a part's gradient → the operator that adds it in place, which takes the same arguments
#: but for the sizes.
_INTO = {aten.select_backward.default: add_select_, aten.slice_backward.default: add_slice_}
#: Sums of fewer parts stay: a chain of element-wise operators that reads one can be one kernel with it.
_FEWEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`fewest`: parts of one value from which on their gradients are summed in place."""

    fewest: int = _FEWEST

    name: ClassVar[str] = "parts"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
        """The step with the sums in place, where there are any: it reads and writes less, so no other form
        competes.
        """
        if not any(len(terms) >= self.fewest for terms in chains(case.step.graph)):
            return
        settings = {"fewest": self.fewest}
        option = StepOption(
            name=IN_PLACE,
            settings=settings,
            told=partial(_told, self.fewest),
            made=self._made(case, self.fewest),
        )
        yield StepChoice(site="", kind=KIND, baseline=PADDED, options=(option,), settled=True)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with its sums of parts in place."""
        return self._made(case, option.setting("fewest", int))

    @staticmethod
    def _made(case: Case, fewest: int) -> Case:
        return replace(case, step=in_place(case.step, fewest))


def chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Sums whose terms are parts' gradients, padded: the additions of each, in the order in which they run.

    An addition belongs to the chain of the one whose sum it reads; its other term is a padded gradient that
    it alone reads.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for add in graph.nodes:
        if not is_sum(add) or not any(map(_is_padded, add.all_input_nodes)):
            continue
        before = next((term for term in add.all_input_nodes if term in found), None)
        found[add] = chain = found.pop(before) if before is not None else []
        chain.append(add)
    return list(found.values())


def in_place(step: Step, fewest: int = _FEWEST) -> Step:
    """A copy of the step in which each part's gradient is added into the sum before it, from `fewest` parts
    of a value on.

    Only into a tensor that nobody else reads. Equal to the original: what is left out is the addition of
    zeros.
    """
    step, _ = copied(step)
    for chain in chains(step.graph):
        for add in chain if len(chain) >= fewest else ():
            _add_in_place(step.graph, add)
    step.graph.lint()
    step.module.recompile()
    return step


def _add_in_place(graph: fx.Graph, add: fx.Node) -> None:
    first, second = add.all_input_nodes
    for whole, padded in ((first, second), (second, first)):
        if _is_padded(padded) and is_free(whole, add):
            part, _, *where = padded.args
            with graph.inserting_before(add):
                into = _INTO[padded.target]  # type: ignore[index]
                add.replace_all_uses_with(call(graph, add, into, whole, part, *where))
            graph.erase_node(add)
            graph.erase_node(padded)
            return


def _is_padded(node: fx.Node) -> bool:
    """A part's gradient as one of the whole, which one operator reads."""
    plain: tuple[Any, ...] = node.args[2:]
    return node.target in _INTO and len(node.users) == 1 and all(type(argument) is int for argument in plain)


def _told(fewest: int, outcome: StepOutcome) -> Iterator[Decision]:
    """One decision for the sums of each block."""
    for block in outcome.cut.blocks:
        written = [node for node in block.backward if node.target in _INTO.values()]
        if written:
            whole = max(outcome.cut.held.nbytes[s] for node in written for s in outcome.cut.held.of[node])
            yield Decision(
                site=block.name, kind=KIND, option=IN_PLACE, baseline=PADDED, by=Parts.name, cost=Cost(),
                baseline_cost=Cost(bytes_transient=2 * whole), settings={"fewest": fewest},
                why=Because("{} parts' gradients are added where the whole's lies", (len(written),)),
            )  # fmt: skip
