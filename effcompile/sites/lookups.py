"""Where values are looked up by an index, and whether it can be negative.

PyTorch raises for an index below 0 in a lookup (`nn.Embedding`, `gather`); other runtimes count it from the
end, or read what happens to be there. `lookups` names the operators, `never_negative` what cannot go wrong,
by intervals of one bit: at least 0, or unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from effcompile.ir.program import Program, dtype_of, shape_of

aten = torch.ops.aten

#: Operators that raise for an index that is negative or too large: the arguments of what is indexed, and of
#: the index.
_INDEXED: dict[Any, tuple[int, int]] = {
    aten.embedding.default: (0, 1), aten.index_select.default: (0, 2), aten.gather.default: (0, 2),
    aten.scatter.value: (0, 2), aten.scatter.src: (0, 2), aten.scatter.reduce: (0, 2),
    aten.scatter.value_reduce: (0, 2), aten.scatter_add.default: (0, 2), aten.scatter_reduce.two: (0, 2),
    aten.index_add.default: (0, 2), aten.index_copy.default: (0, 2), aten.one_hot.default: (1, 0),
    aten.embedding_bag.padding_idx: (0, 1), aten.embedding_bag.default: (0, 1),
    aten.nll_loss_nd.default: (0, 1), aten.nll_loss.default: (0, 1), aten.cross_entropy_loss.default: (0, 1),
}  # fmt: skip
_FIRST_AXIS = (aten.embedding.default, aten.embedding_bag.padding_idx, aten.embedding_bag.default)
#: Of losses the place of `ignore_index`.
_LOSSES: dict[Any, int] = {
    aten.nll_loss_nd.default: 4,
    aten.nll_loss.default: 4,
    aten.cross_entropy_loss.default: 4,
}
_IGNORED = -100
#: Operators that count a negative index from the end and raise for one that is further off: with a list of
#: indices, one an axis, and with one index of one axis.
_SUBSCRIBED = (
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default,
)  # fmt: skip
_FILLED = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
#: What hands on a tensor's values as they are.
SAME_VALUES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.clone.default,
    aten.contiguous.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.to.dtype,
    aten.flatten.using_ints, aten.permute.default, aten.transpose.int,
)  # fmt: skip
#: Of those, what leaves some out.
_PARTS = (aten.slice.Tensor, aten.select.int)

#: Results of an order and their places; parts of a tensor.
_ORDERED = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
_DIVIDED = (aten.split.Tensor, aten.chunk.default, aten.unbind.int, aten.split_with_sizes.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An operator that reads or writes at an index.

    `at`: which argument the index is. `size`: how long the indexed axis is, 0 where it has no fixed length.
    `constant`: what is indexed is a weight. `ignored`: an index that a loss leaves out.
    `from_end`: a negative one counts from the end. `part`: which one of a list of indices it is (`x[i, j]`),
    -1 of none. `axis`: the axis of `held`, where it is known.
    """

    node: fx.Node
    index: fx.Node
    at: int
    size: int
    constant: bool
    ignored: int | None = None
    from_end: bool = False
    part: int = -1
    held: fx.Node | None = None
    axis: int | None = None

    @property
    def source(self) -> fx.Node:
        """What the index is a view or a cast of."""
        return self._chain()[-1]

    @property
    def whole(self) -> bool:
        """Whether every value of the source is an index."""
        return not any(node.target in _PARTS for node in self._chain()[:-1])

    def _chain(self) -> list[fx.Node]:
        """The index, what that is a view or a cast of, and so on."""
        found = [self.index]
        while found[-1].target in SAME_VALUES and isinstance(source := found[-1].args[0], fx.Node):
            found.append(source)
        return found


def lookups(program: Program) -> Iterator[Lookup]:
    """All operators of the graph that raise for an index that is out of range, in graph order."""
    for node in program.calls(*_INDEXED):
        holder, at = _INDEXED[node.target]
        index = node.args[at]
        if isinstance(index, fx.Node):
            held = node.args[holder] if holder < len(node.args) else None
            axis = _axis(node, held) if isinstance(held, fx.Node) else None
            yield Lookup(
                node=node,
                index=index,
                at=at,
                size=_size(held, axis),
                constant=isinstance(held, fx.Node) and held.op == "get_attr",
                ignored=_ignored(node),
                held=held if isinstance(held, fx.Node) and axis is not None else None,
                axis=axis,
            )


def subscripts(program: Program) -> Iterator[Lookup]:
    """All indices of the graph that may count from the end (`x[i, j]`), in graph order; not masks."""
    for node in program.calls(*_SUBSCRIBED, *_FILLED):
        held, *others = node.args
        assert isinstance(held, fx.Node)
        if node.target in _FILLED:
            if isinstance(others[1], fx.Node):
                yield _subscript(node, held, others[1], at=2, part=-1, axis=_axis(node, held))
            continue
        axis = 0
        parts: Any = others[0]
        for part, index in enumerate(parts):
            mask = isinstance(index, fx.Node) and dtype_of(index) in (torch.bool, torch.uint8)
            if isinstance(index, fx.Node) and not mask:
                yield _subscript(node, held, index, at=1, part=part, axis=axis)
            axis += len(shape_of(index)) if mask else 1


def _subscript(
    node: fx.Node, held: fx.Node, index: fx.Node, *, at: int, part: int, axis: int | None
) -> Lookup:
    return Lookup(
        node=node,
        index=index,
        at=at,
        size=_size(held, axis),
        constant=held.op == "get_attr",
        from_end=axis is not None,
        part=part,
        held=held,
        axis=axis,
    )


def _shape(held: fx.Node) -> tuple[int | torch.SymInt, ...]:
    value = held.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else shape_of(held)


def _axis(node: fx.Node, held: fx.Node) -> int | None:
    """Which axis is indexed; None where it is not known, and of a single number."""
    shape = _shape(held)
    axis = (
        0
        if node.target in _FIRST_AXIS
        else min(1, len(shape) - 1)
        if node.target in _LOSSES
        else node.args[1]
    )
    return axis % len(shape) if isinstance(axis, int) and shape else None


def _size(held: object, axis: int | None) -> int:
    if not isinstance(held, fx.Node):
        return held if isinstance(held, int) and held > 0 else 0  # the classes of one_hot
    shape = _shape(held)
    size = shape[axis] if axis is not None and axis < len(shape) else 0
    return size if isinstance(size, int) else 0


def _ignored(node: fx.Node) -> int | None:
    place = _LOSSES.get(node.target)
    if place is None:
        return None
    found = node.args[place] if len(node.args) > place else node.kwargs.get("ignore_index", _IGNORED)
    return found if isinstance(found, int) else _IGNORED


def may_be_negative(program: Program, found: Iterable[Lookup] | None = None) -> list[Lookup]:
    """The lookups whose index is computed in the graph and is not proven to be at least 0."""
    signs = _Signs(program)
    found = lookups(program) if found is None else found
    return [each for each in found if not signs.never_negative(each.index)]


def reads_inputs(node: fx.Node) -> bool:
    """Whether a value depends on those of the inputs, and not on their sizes alone."""
    seen, left = set(), [node]
    while left:
        value = left.pop()
        if value.op == "placeholder":
            return True
        if value not in seen and value.target is not aten.sym_size.int:
            seen.add(value)
            left += value.all_input_nodes
    return False


class _Signs:
    """Which values of a graph are at least 0 whatever the inputs are."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[fx.Node, bool] = {}

    def never_negative(self, value: object) -> bool:
        if isinstance(value, fx.Node):
            if value not in self._known:
                self._known[value] = False  # until it is known
                self._known[value] = self._decide(value)
            return self._known[value]
        if isinstance(value, list | tuple):
            return all(map(self.never_negative, value))
        return isinstance(value, int | float) and value >= 0

    def _decide(self, node: fx.Node) -> bool:
        if dtype_of(node) in (torch.bool, torch.uint8):
            return True
        if node.op == "get_attr":
            held = self._program.tensor(node)
            return (
                held is not None and held.device.type != "meta" and bool(not held.numel() or held.min() >= 0)
            )
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        return rule is not None and rule(self, node)


_Rule = Callable[[_Signs, fx.Node], bool]


def _all(*places: int) -> _Rule:
    """At least 0 where all of these arguments are."""
    return lambda signs, node: all(
        place < len(node.args) and signs.never_negative(node.args[place]) for place in places
    )


def _any(signs: _Signs, node: fx.Node) -> bool:
    return any(map(signs.never_negative, node.args[:2]))


def _clamped(signs: _Signs, node: fx.Node) -> bool:
    low, high = (
        node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in ((1, "min"), (2, "max"))
    )
    above = high is None or signs.never_negative(high)
    return above and ((low is not None and signs.never_negative(low)) or signs.never_negative(node.args[0]))


def _counted(signs: _Signs, node: fx.Node) -> bool:
    """arange(end), arange(start, end), arange(start, end, step): from a start that is not
    negative, upwards.
    """
    start, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    return signs.never_negative(start) and isinstance(step, int | float) and step > 0


def _of_remainder(signs: _Signs, node: fx.Node) -> bool:
    """The remainder has the sign of the divisor."""
    return signs.never_negative(node.args[1])


def _part(signs: _Signs, node: fx.Node) -> bool:
    """One of several results: the places that a sort or a maximum found, or a part of a tensor."""
    source, number = node.args
    if not isinstance(source, fx.Node) or source.target not in (*_ORDERED, *_DIVIDED):
        return False
    places = source.target in _ORDERED and isinstance(number, int) and number == 1
    return places or signs.never_negative(source.args[0])


def _always(signs: _Signs, node: fx.Node) -> bool:
    return True


def _handed_on(signs: _Signs, node: fx.Node) -> bool:
    """The same values; but a float that is infinite or NaN becomes a negative integer."""
    source, kind = node.args[0], dtype_of(node)
    floating = isinstance(source, fx.Node) and (of := dtype_of(source)) is not None and of.is_floating_point
    return signs.never_negative(source) and not (floating and kind is not None and not kind.is_floating_point)


def _sum(signs: _Signs, node: fx.Node) -> bool:
    return signs.never_negative(node.args[:2]) and signs.never_negative(node.kwargs.get("alpha", 1))


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(SAME_VALUES, _handed_on),
    aten.add.Tensor: _sum,
    **dict.fromkeys(
        (
            aten.cumsum.default,
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.cat.default,
            aten.stack.default,
            aten.repeat.default,
            aten.flip.default,
            aten.roll.default,
            aten.gather.default,
            aten.index_select.default,
            aten.index.Tensor,
            aten.embedding.default,
            aten.max.default,
            aten.amax.default,
            aten.min.default,
            aten.amin.default,
            aten.floor.default,
        ),
        _all(0),
    ),
    **dict.fromkeys(
        (
            aten.add.Scalar,
            aten.mul.Tensor,
            aten.mul.Scalar,
            aten.minimum.default,
            aten.floor_divide.default,
            aten.div.Tensor_mode,
            aten.div.Tensor,
            operator.add,
            operator.mul,
            operator.floordiv,
        ),
        _all(0, 1),
    ),
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _all(1, 2)
    ),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _all(0, 2)),
    **dict.fromkeys((aten.maximum.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), _any),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default), _clamped),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _counted),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _of_remainder),
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), _all(1)),
    **dict.fromkeys(
        (
            aten.abs.default,
            aten.relu.default,
            aten.argmax.default,
            aten.argmin.default,
            aten.argsort.default,
            aten.zeros.default,
            aten.ones.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.sym_size.int,
            aten.one_hot.default,
            aten.searchsorted.Tensor,
            aten.bucketize.Tensor,
        ),
        _always,
    ),
    operator.getitem: _part,
}
