"""Integers that a graph makes of its inputs and that may be too large for a runtime that rounds them.

Intervals of whole numbers, from what the inputs may hold: where a product or a sum may lie beyond, the same
is computed of absolute values in floating point, of which a comparison tells whether it does. Those are never
smaller than the integer, which may have wrapped by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from effcompile.core.types import Value
from effcompile.ir.program import Program, dtype_of
from effcompile.sites.lookups import SAME_VALUES, reads_inputs

aten = torch.ops.aten

#: Operators whose results may be larger than their operands; the same of absolute values is no smaller.
_GROWING: Mapping[Any, Any] = {
    aten.mul.Tensor: aten.mul.Tensor, aten.mul.Scalar: aten.mul.Scalar,
    aten.add.Tensor: aten.add.Tensor, aten.add.Scalar: aten.add.Scalar,
    aten.sub.Tensor: aten.add.Tensor, aten.sub.Scalar: aten.add.Scalar, aten.rsub.Scalar: aten.add.Scalar,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar, aten.square.default: aten.square.default,
    aten.sum.default: aten.sum.default, aten.sum.dim_IntList: aten.sum.dim_IntList,
    aten.cumsum.default: aten.cumsum.default, aten.prod.default: aten.prod.default,
    aten.prod.dim_int: aten.prod.dim_int, aten.matmul.default: aten.matmul.default,
    aten.mm.default: aten.mm.default, aten.bmm.default: aten.bmm.default,
    aten.linear.default: aten.linear.default, aten.dot.default: aten.dot.default,
}  # fmt: skip
#: What gives numbers of its operands, the first or all, or less.
_FIRST = (
    *SAME_VALUES, aten.type_as.default, aten.abs.default, aten.neg.default, aten.relu.default,
    aten.gather.default,
    aten.index_select.default, aten.index.Tensor, aten.masked_select.default, aten.repeat.default,
    aten.flip.default, aten.roll.default, aten.amax.default, aten.amin.default, aten.max.default,
    aten.min.default, aten.floor_divide.default, aten.div.Tensor_mode, aten.fmod.Scalar,
)  # fmt: skip
_ALL = (
    aten.cat.default, aten.stack.default, aten.maximum.default, aten.minimum.default, aten.where.self,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
)  # fmt: skip
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default)
_ALONG = (aten.sum.dim_IntList, aten.cumsum.default, aten.prod.dim_int)
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.sym_size.int)
#: An axis of a free length is taken for no longer.
_LONGEST = 1 << 20
#: Whose first two arguments are both numbers.
_BINARY = (
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar,
    aten.rsub.Scalar,
)  # fmt: skip
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)


class _Magnitudes:
    """The largest absolute value that an integer of a graph may have."""

    def __init__(self, program: Program, inputs: Mapping[fx.Node, int], limit: int) -> None:
        self._program, self._inputs, self._limit = program, inputs, limit
        self._known: dict[fx.Node, float] = {}

    def of(self, value: object) -> float:
        if isinstance(value, fx.Node):
            if value not in self._known:
                self._known[value] = min(self._decide(value), self._limit)
            return self._known[value]
        if isinstance(value, list | tuple):
            return max(map(self.of, value), default=0)
        return abs(value) if isinstance(value, int | float) else 0

    def grown(self, node: fx.Node) -> float:
        """Before it is known to be within the limit."""
        args, target = node.args, node.target
        if target in _BINARY and target not in (aten.mul.Tensor, aten.mul.Scalar):
            scale = args[2] if len(args) > 2 else node.kwargs.get("alpha", 1)
            return self.of(args[0]) + self.of(args[1]) * self.of(scale)
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return self.of(args[0]) * self.of(args[1])
        base = self.of(args[0])
        if target in _SUMS:
            return base * _among(node)
        return math.inf if base > 1 else _among(node)

    def _decide(self, node: fx.Node) -> float:
        dtype = dtype_of(node)
        if dtype is torch.bool:
            return 1
        if dtype is not None and not dtype.is_floating_point and dtype.itemsize == 1:
            return 255
        if node.op == "placeholder":
            return self._inputs.get(node, self._limit + 1) - 1
        if node.op == "get_attr":
            held = self._program.tensor(node)
            known = held is not None and held.device.type != "meta" and held.numel()
            return float(held.abs().max()) if held is not None and known else self._limit
        if node.target in _REMAINDERS:
            return self.of(node.args[1])
        if node.target is aten.clamp.default and len(node.args) == 3:
            low, high = node.args[1:]
            return max(self.of(low), self.of(high)) if low is not None and high is not None else self._limit
        if node.target in _COUNTS:
            return max([_LONGEST, *(abs(arg) for arg in node.args if isinstance(arg, int))])
        if node.target in _GROWING:
            return self.grown(node)
        if node.target in _FIRST:
            return self.of(node.args[0])
        return self.of(node.args) if node.target in _ALL else self._limit


def _among(node: fx.Node) -> float:
    """How many numbers a sum is of, at the most."""
    held, *others = node.args
    assert isinstance(held, fx.Node)
    value = held.meta["val"]
    axes = others[0] if others and node.target in _ALONG else None
    chosen = (
        [axes] if isinstance(axes, int) else axes if isinstance(axes, list | tuple) else range(value.dim())
    )
    sizes = [value.shape[axis] for axis in chosen if isinstance(axis, int)]
    return math.prod(size if isinstance(size, int) else _LONGEST for size in sizes)


def too_large(program: Program, inputs: Mapping[fx.Node, int], limit: int) -> list[fx.Node]:
    """Operators whose integers may lie at the limit or beyond, by what the inputs hold.

    inputs: of those that are looked at by others, one more than the largest value.
    """
    sizes = _Magnitudes(program, inputs, limit)
    return [
        node
        for node in program.graph.nodes
        if node.target in _GROWING
        and _is_whole(node)
        and reads_inputs(node)
        and sizes.grown(node) >= limit
        and not _of_numbers(node)
    ]


def _is_whole(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype.itemsize >= 4


def _of_numbers(node: fx.Node) -> bool:
    """Whether it is computed of places in floating point (of an image, say): those are looked at where they
    are an index.
    """
    seen, left = set(), [node]
    while left:
        value = left.pop()
        dtype = dtype_of(value)
        if dtype is not None and dtype.is_floating_point:
            return True
        if value not in seen:
            seen.add(value)
            left += [] if dtype is torch.bool else value.all_input_nodes
    return False


def flag_of(graph: fx.Graph, node: fx.Node, limit: int) -> fx.Node:
    """A scalar, made where the graph inserts: the operator's integers are below the limit."""
    args = fx.node.map_arg(node.args, lambda each: _size_of(graph, each))
    kwargs = {key: value for key, value in node.kwargs.items() if key != "dtype"}
    if node.target in _BINARY:
        args, kwargs = tuple(map(_unsigned, args)), {key: _unsigned(value) for key, value in kwargs.items()}
    call = _calls(graph, node)
    below = call(
        aten.lt.Scalar, torch.bool, call(_GROWING[node.target], torch.float32, *args, **kwargs), float(limit)
    )
    return call(aten.all.default, torch.bool, below)


def _unsigned(value: fx.node.Argument) -> fx.node.Argument:
    return abs(value) if isinstance(value, int | float) else value


def _size_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Absolute values in floating point; sizes as they are."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    call = _calls(graph, node)
    number = call(aten._to_copy.default, torch.float32, node, dtype=torch.float32)
    return call(aten.abs.default, torch.float32, number)


def _calls(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    """Makes calls whose results are as large as another's."""

    def call(target: Callable[..., object], kind: torch.dtype, *args: Value, **kwargs: Value) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        value = like.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta = {"val": value.new_empty(value.shape, dtype=kind)}
        return node

    return call
