"""A training pass as another package would have it: products with one, which change nothing, are left out of
the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.plan import Declined
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.passes.training.step_edit import copied

KEPT, REMOVED = "kept", "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscale:
    """`least`: so many products are worth it."""

    least: int = 1

    name: ClassVar[str] = "unscale"
    exact: ClassVar[bool] = True

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        found = [node for node in case.step.graph.nodes if _by_one(node)]
        if len(found) < self.least:
            yield Declined(
                site="step",
                kind="products with one",
                option=REMOVED,
                by=self.name,
                reason=Unsupported("there are {}", (len(found),)),
            )
            return
        options = (
            StepOption(name=KEPT),
            StepOption(
                name=REMOVED, settings={"count": len(found)}, why=Because("{} products less", (len(found),))
            ),
        )
        yield StepChoice(site="step", kind="products with one", baseline=KEPT, options=options)

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        step, _ = copied(case.step)
        for node in [node for node in step.graph.nodes if _by_one(node)]:
            node.replace_all_uses_with(node.args[0])
            step.graph.erase_node(node)
        step.module.recompile()
        return replace(case, step=step)


def _by_one(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.mul.Tensor and node.args[1] == 1.0
