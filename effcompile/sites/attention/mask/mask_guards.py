"""What a recovered mask takes for granted of the inputs: each as a reason, as a check of inputs, and as nodes
that check in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from effcompile.core.reasons import Because, Reason
from effcompile.ir.program import Program
from effcompile.sites.attention.mask.evaluate import Values, evaluate, reads
from effcompile.sites.attention.mask.graph_mask import MaskGuard
from effcompile.sites.attention.mask.mask_terms import NEVER
from effcompile.sites.attention.node_builder import Emitter

aten = torch.ops.aten


def only_zero_one(program: Program, node: fx.Node) -> MaskGuard:
    """The node, of which 1 − node or node · fill is taken, is a flag."""
    said = Because.of("{} holds only 0 and 1", _names(node))
    return _on(program, node, said, lambda v: _all(_either(aten.eq.Scalar(v, 0), aten.eq.Scalar(v, 1))))


def fills_only(program: Program, node: fx.Node) -> MaskGuard:
    """The node, which is added to the scores, hides or does nothing."""
    said = Because.of("{} adds 0 or at most {} to a score", _names(node), NEVER)
    return _on(program, node, said, lambda v: _all(_either(aten.eq.Scalar(v, 0), aten.le.Scalar(v, NEVER))))


def every_query_sees(
    program: Program, node: fx.Node, visible: Callable[[Tensor], Tensor], given: Values
) -> MaskGuard:
    """No row of the mask is empty: what a softmax makes of one depends on how it was hidden."""
    return _on(
        program, node, Because("every query sees a key"), lambda v: _all(aten.any.dim(visible(v), -1)), given
    )


def no_longer_than(program: Program, sizes: Mapping[str, int]) -> MaskGuard:
    """The named axes are no longer than what a form was fitted to."""

    def check(inputs: Sequence[Tensor]) -> bool:
        named = (
            (dim, size)
            for spec, tensor in zip(program.inputs, inputs, strict=True)
            for dim, size in zip(spec.shape, tensor.shape)  # noqa: B905
        )
        return all(size <= sizes.get(str(dim), size) for dim, size in named)

    def holds(emit: Emitter) -> fx.Node:
        return conjunction(
            emit, [emit.no_longer_than(*_axis(program, dim), size) for dim, size in sizes.items()]
        )

    said = Because.of(", ".join(["{} ≤ {}"] * len(sizes)), *(part for axis in sizes.items() for part in axis))
    return MaskGuard(said=said, check=check, holds=holds)


def conjunction(emit: Emitter, conditions: Sequence[fx.Node]) -> fx.Node:
    """All of them, at least one, as one bool of no axes."""
    first, *rest = conditions
    return functools.reduce(lambda a, b: emit.call(aten.logical_and.default, (a, b)), rest, first)


def by_placeholder(program: Program, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """The tensors in the order of `Program.inputs`, by their placeholders."""
    return dict(zip(_tensors(program), inputs, strict=True))


def _on(
    program: Program,
    node: fx.Node,
    said: Reason,
    holds: Callable[[Tensor], Tensor],
    given: Values | None = None,
) -> MaskGuard:
    """`holds` is made of aten operators, to be run and to be traced."""

    def check(inputs: Sequence[Tensor]) -> bool:
        return bool(
            holds(evaluate(program, [node], {**by_placeholder(program, inputs), **(given or {})})[node])
        )

    return MaskGuard(said=said, check=check, holds=lambda emit: emit.inline(holds, node))


def _all(conditions: Tensor) -> Tensor:
    return aten.all.default(conditions)


def _either(a: Tensor, b: Tensor) -> Tensor:
    return aten.logical_or.default(a, b)


def _axis(program: Program, dim: str) -> tuple[fx.Node, int]:
    """The first input with an axis of this name, and which it is."""
    named = zip(_tensors(program), program.inputs, strict=True)
    return next((node, spec.shape.index(dim)) for node, spec in named if dim in spec.shape)


def _tensors(program: Program) -> list[fx.Node]:
    return [
        n for n in program.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)
    ]


def _names(node: fx.Node) -> str:
    return " and ".join(n.name for n in reads(node)) or node.name
