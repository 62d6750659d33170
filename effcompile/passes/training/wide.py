"""Products of a step in 16 bits, computed in float32 where that is faster: on CPUs that have no 16-bit
instructions (ops/wide.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.reasons import Because
from effcompile.ir.plan import Decision
from effcompile.ir.step import Step
from effcompile.ops.wide import pays, product_ratio
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.passes.training.precision import Precision
from effcompile.passes.training.step_edit import call, copied

aten, ours = torch.ops.aten, torch.ops.effcompile

KIND, NARROW, WIDE = "16-bit products", "as given", "in fp32"
_FASTER = (
    "products of 16-bit matrices take {} × as long as in fp32 on this machine, measured: cast, and "
    "rounded once"
)
_LEANER = (
    "nothing is within the budget beside copies in fp32; products of 16-bit matrices take {} × as "
    "long here, measured"
)
#: aten's products of matrices → ours, which take the same arguments.
_WIDE = {aten.mm.default: ours.wide_mm.default, aten.addmm.default: ours.wide_addmm.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class WideProducts:
    """`enabled`: compute 16-bit products in float32 and round once, where that is measured to be faster."""

    enabled: bool = True

    name: ClassVar[str] = "wide"
    exact: ClassVar[bool] = True  # the same sums, rounded once, in another order

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
        """The step with all its 16-bit products so, on this machine; as they are given they are in reserve.

        For what they take in fp32 stands beside the step, where eager has nothing: a budget that eager keeps
        may be too small for it. A step that `precision` has put under autocast keeps autocast's own numbers,
        which its error was measured of.
        """
        if any(chosen.by == Precision.name and chosen.changes for chosen in case.taken):
            return
        found = {
            dtype
            for dtype in _dtypes(case.step)
            if self.enabled and context.here and pays(dtype, _device(case.step))
        }
        if found:
            told = max(round(product_ratio(dtype, _device(case.step)), 1) for dtype in found)
            wide = StepOption(name=WIDE, told=lambda outcome: [_decision(WIDE, Because(_FASTER, (told,)))])
            narrow = StepOption(
                name=NARROW, told=lambda outcome: [_decision(NARROW, Because(_LEANER, (told,)))]
            )
            yield StepChoice(site="", kind=KIND, baseline=NARROW, options=(wide,), reserve=(narrow,))

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with its 16-bit products in float32."""
        step, _ = copied(case.step)
        for node in list(step.graph.nodes):
            if _is_narrow(node):
                with step.graph.inserting_before(node):
                    node.replace_all_uses_with(call(step.graph, node, _WIDE[node.target], *node.args))
                step.graph.erase_node(node)
        step.graph.lint()
        step.module.recompile()
        return replace(case, step=step)


def _is_narrow(node: fx.Node) -> bool:
    """A product of 16-bit matrices, with a bias of one number a column at the most, unscaled."""
    if (
        node.target not in _WIDE
        or node.kwargs
        or node.meta["val"].dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    return len(node.args) == 2 or node.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]


def _dtypes(step: Step) -> set[torch.dtype]:
    return {node.meta["val"].dtype for node in step.graph.nodes if _is_narrow(node)}


def _device(step: Step) -> str:
    return str(step.loss.meta["val"].device.type)


def _decision(option: str, why: Because) -> Decision:
    return Decision(
        site=KIND,
        kind=KIND,
        option=option,
        baseline=NARROW,
        by=WideProducts.name,
        cost=Cost(),
        baseline_cost=Cost(),
        why=why,
    )
