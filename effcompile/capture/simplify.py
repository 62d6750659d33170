"""Graphs without what changes nothing: whole numbers with 0 added, masks with what is true everywhere,
lookups that give each element where it is, and casts to the dtype that is there.

Transformers' masks are made so (`masking_utils.py`): `padding[batch, keys]` of ranges over both axes, and
`queries >= 0`. At every call these are a dozen operators, which take longer than an attention of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, fx

from effcompile.core.torch_compat_export import known_equal
from effcompile.ir.owned import received

aten = torch.ops.aten
_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
#: Made of one number, the argument at this place.
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)


def simplify(graph: fx.Graph) -> None:
    """Replace each by what it reads. Not what a caller receives, which must be its own."""
    theirs = received(graph)
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" and node not in theirs else None
        if rule is not None and (other := rule(node)) is not None:
            node.replace_all_uses_with(other)
    graph.eliminate_dead_code()


def _without_zero(add: fx.Node) -> fx.Node | None:
    """x of `x + 0`, of whole numbers: of floating-point ones it turns -0.0 into 0.0."""
    source = add.args[0]
    if len(add.args) != 2 or add.kwargs or add.args[1] != 0 or not isinstance(source, fx.Node):
        return None
    value = _value(source)
    whole = value is not None and not value.is_floating_point() and not value.is_complex()
    return source if whole and _alike(add, source) else None


def _without_true(both: fx.Node) -> fx.Node | None:
    """x of `x & True`; where that is wider than x, what expands it has x instead, if it says all sizes that
    x has not.
    """
    one, other = both.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    kept = one if _is_true(other) else other if _is_true(one) else None
    value = None if kept is None else _value(kept)
    if kept is None or value is None or value.dtype is not torch.bool:
        return None
    if _alike(both, kept):
        return kept
    for user in list(both.users):
        if _expands(user, both, kept):
            user.args = (kept, *user.args[1:])
    return None


def _expands(user: fx.Node, wide: fx.Node, narrow: fx.Node) -> bool:
    """Whether it makes the same of both."""
    sizes = user.args[1] if user.target is aten.expand.default and not user.kwargs else None
    mine, other = _value(wide), _value(narrow)
    if not isinstance(sizes, Sequence) or mine is None or other is None or mine.dim() != other.dim():
        return False
    kept = list(sizes)[-mine.dim() :]
    return len(kept) == mine.dim() and all(
        known_equal(a, b) or (known_equal(b, 1) and size != -1)
        for size, a, b in zip(kept, mine.shape, other.shape, strict=True)
    )


def _in_place(index: fx.Node) -> fx.Node | None:
    """x as a view, for `x[i, j]` with i, j the ranges over its axes, each along an axis of its own and in
    their order.
    """
    source, indices = index.args
    value, result = _value(source), _value(index)
    if value is None or result is None or not isinstance(indices, Sequence) or len(indices) != value.dim():
        return None
    axes = [_range_of(each, size, result.dim()) for each, size in zip(indices, value.shape, strict=True)]
    found = [axis for axis in axes if axis is not None]
    if len(found) < len(axes) or any(left >= right for left, right in pairwise(found)):
        return None
    with index.graph.inserting_before(index):
        for axis in range(result.dim()):
            if axis not in found:
                made = index.graph.call_function(aten.unsqueeze.default, (source, axis))
                value = value.unsqueeze(axis)
                source, made.meta = made, {**index.meta, "val": value}
    return source if isinstance(source, fx.Node) and _alike(index, source) else None


def _without_cast(cast: fx.Node) -> fx.Node | None:
    """x of `x.type_as(y)`, where y is of its dtype and device: four in a layer of Llama4's."""
    source = cast.args[0]
    there = _value(source)
    same = there is not None and there.device == cast.meta["val"].device
    return source if isinstance(source, fx.Node) and same and _alike(cast, source) else None


def _range_of(node: object, size: int | torch.SymInt, dims: int) -> int | None:
    """The axis, among so many, along which it counts 0, 1, ... up to `size`, where it has no other one."""
    inserted = list[int]()
    while isinstance(node, fx.Node) and node.target is aten.unsqueeze.default:
        at, value = node.args[1], _value(node)
        assert isinstance(at, int) and value is not None
        inserted.append(at % value.dim())
        node = node.args[0]
    value = _value(node)
    counts = value is not None and value.dtype is torch.int64 and _is_range(node)
    if value is None or not counts or not known_equal(value.shape[0], size):
        return None
    axis = 0
    for at in reversed(inserted):
        axis += at <= axis
    return axis + dims - len(inserted) - 1


def _is_true(node: fx.Node) -> bool:
    """Whether it is true at every place: of bools made so, of a range that is at least 0, of both."""
    value = _value(node)
    if value is None or value.dtype is not torch.bool:
        return False
    if node.target in _FILLED:
        return node.args[_FILLED[node.target]] is True
    if node.target in _ONES:
        return True
    if node.target is aten.ge.Scalar:
        counts = isinstance(node.args[0], fx.Node) and _counts(node.args[0])
        return counts and isinstance(node.args[1], int) and node.args[1] <= 0
    sources = node.args[: 2 if node.target in _AND else 1]
    follows = node.target in (*_AND, aten.expand.default, aten.unsqueeze.default)
    return follows and all(isinstance(source, fx.Node) and _is_true(source) for source in sources)


def _counts(node: fx.Node) -> bool:
    """Whether it is a range from 0 on, along some axis."""
    while node.target is aten.unsqueeze.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return _is_range(node)


def _is_range(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.arange.default and len(node.args) == 1


def _value(node: object) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether both have one dtype and one shape, at every call."""
    mine, theirs = _value(node), _value(other)
    return (
        mine is not None
        and theirs is not None
        and mine.dtype is theirs.dtype
        and mine.dim() == theirs.dim()
        and all(known_equal(a, b) for a, b in zip(mine.shape, theirs.shape, strict=True))
    )


_RULES: dict[object, Callable[[fx.Node], fx.Node | None]] = {
    aten.add.Tensor: _without_zero,
    **dict.fromkeys(_AND, _without_true),
    aten.index.Tensor: _in_place,
    aten.type_as.default: _without_cast,
}
