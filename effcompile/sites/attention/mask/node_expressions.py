"""Small expressions on a node of the graph: computed on a tensor, or put into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.sites.attention.mask.mask_terms import NEVER, MaskLeaf

aten = torch.ops.aten
KEY, QUERY = -1, -2
_TESTS: dict[str, tuple[Callable[..., Any], float]] = {
    "true": (aten.ne.Scalar, 0), "false": (aten.eq.Scalar, 0), "kept": (aten.gt.Scalar, NEVER),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expression:
    """`node` after `steps`: operators with the arguments that follow the value, all of them numbers."""

    node: fx.Node
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = ()

    def then(self, target: Callable[..., object], *args: object) -> Expression:
        return Expression(node=self.node, steps=(*self.steps, (target, args)))

    def of(self, value: Tensor) -> Tensor:
        """The expression where the node has this value."""
        for target, args in self.steps:
            value = target(value, *args)
        return value

    def emit(self, graph: fx.Graph) -> fx.Node:
        """The expression as nodes at the graph's insertion point (`inserting_before` a node), with
        `meta["val"]` where the node has one.
        """
        node, value = self.node, self.node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        for target, args in self.steps:
            node = graph.call_function(target, (node, *args))
            if mode is not None:
                with mode:
                    value = target(value, *args)
                node.meta["val"] = value
        return node


def tested(leaf: MaskLeaf) -> Expression:
    """The leaf's condition, as bool in the shape of its node."""
    value = leaf.node.meta.get("val")
    if leaf.test == "true" and isinstance(value, Tensor) and value.dtype is torch.bool:
        return Expression(node=leaf.node)
    target, limit = _TESTS[leaf.test]
    return Expression(node=leaf.node).then(target, limit)


def along(expression: Expression, axis: int, rank: int) -> Expression:
    """[B or 1, S] of a value of this rank that varies with the batch and with one of the last two
    axes alone.
    """
    if rank == 1:
        return expression.then(aten.unsqueeze.default, 0)
    for other in (a for a in range(rank - 1, -1, -1) if a != rank + axis and not (rank == 4 and a == 0)):
        expression = expression.then(aten.select.int, other, 0)
    return expression if rank == 4 else expression.then(aten.unsqueeze.default, 0)


def whole(expression: Expression, rank: int) -> Expression:
    """The value with four axes."""
    for _ in range(4 - rank):
        expression = expression.then(aten.unsqueeze.default, 0)
    return expression


def varies(shapes: Sequence[Sequence[int]]) -> set[int]:
    """Axes, counted from the end (−1 the last), that are longer than 1 at one of these shapes of the same
    value.
    """
    return {axis - len(shape) for shape in shapes for axis, size in enumerate(shape) if size != 1}
