"""The gradients of 16-bit attentions by AMX's tiles, where that is faster than torch's kernel
(ops/bf16_attention_backward.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.reasons import Because
from effcompile.ir.plan import Decision
from effcompile.ir.step import Step
from effcompile.ops.bf16_attention_backward import Given, bf16_attention_backward, time_share
from effcompile.ops.torch_attention import BACKWARD
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.passes.training.step_edit import call, copied

KIND, TORCH, TILES = "attention gradients", "by torch", "by tiles of bf16"
_FASTER = "AMX multiplies them in {} × the time of torch's kernel on this machine, measured"
_LEANER = "nothing is within the budget beside what the tiles' kernel holds for itself"
#: Of torch's time, from which on nothing is gained that a measurement can tell.
_SLOW = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledGradients:
    """`enabled`: compute the gradients of bf16 attentions by AMX's tiles, where that is measured to be
    faster.
    """

    enabled: bool = True

    name: ClassVar[str] = "tiled"
    exact: ClassVar[bool] = True  # products of the same rounded numbers, summed in fp32 in another order

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice]:
        """The step with all its bf16 attentions' gradients so, on this machine; by torch they are in reserve,
        for what it holds beside the step is another number of bytes.
        """
        found = list(_found(case.step)) if self.enabled and context.here else []
        shares = [share for share in map(_share, found) if share < _SLOW]
        if shares:
            told = Because(_FASTER, (round(max(shares), 2),))
            tiles = StepOption(name=TILES, told=lambda outcome: [_decision(TILES, told)])
            torchs = StepOption(name=TORCH, told=lambda outcome: [_decision(TORCH, Because(_LEANER))])
            yield StepChoice(site="", kind=KIND, baseline=TORCH, options=(tiles,), reserve=(torchs,))

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with those gradients by tiles."""
        step, _ = copied(case.step)
        for node in [node for node in _found(step) if _share(node) < _SLOW]:
            with step.graph.inserting_before(node):
                made = call(step.graph, node, bf16_attention_backward.default, *_arguments(node))
            node.replace_all_uses_with(made)
            step.graph.erase_node(node)
        step.graph.lint()
        step.module.recompile()
        return replace(case, step=step)


def _arguments(node: fx.Node) -> tuple[fx.node.Argument, ...]:
    return (*node.args, node.kwargs.get("attn_mask"), node.kwargs.get("scale"))


def _found(step: Step) -> Iterator[fx.Node]:
    """The gradients that the kernel takes."""
    for node in step.graph.nodes:
        if node.target is BACKWARD.default:
            given: Any = fx.map_arg(_arguments(node), lambda each: each.meta["val"])
            if Given(*given).fits():
                yield node


def _share(node: fx.Node) -> float:
    query, key = (node.args[place].meta["val"] for place in (1, 2))  # type: ignore[union-attr]
    return time_share(int(query.shape[2]), int(key.shape[2]), int(query.shape[3]))


def _decision(option: str, why: Because) -> Decision:
    return Decision(
        site=KIND, kind=KIND, option=option, baseline=TORCH, by=TiledGradients.name, cost=Cost(),
        baseline_cost=Cost(), why=why,
    )  # fmt: skip
