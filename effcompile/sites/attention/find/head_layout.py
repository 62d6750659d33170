"""Operands of an attention as [B, H, rows, columns], whatever axes the model's own products have; grouped
heads ungrouped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.sites.attention.find.fx_queries import (
    CASTS,
    COPIES,
    RESHAPES,
    argument,
    aten,
    moves_nothing,
    number,
    source_of,
    swaps_last_two,
)
from effcompile.sites.attention.find.normal_form import (
    AxisStep,
    NotThisFormError,
    Operand,
    SizeOf,
    same,
    same_shape,
    tensor_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The leading axes of the scores somewhere on their way: their sizes, and as what a graph can
    give them.
    """

    sizes: tuple[Any, ...]
    given: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Frame:
        sizes = tuple(tensor_of(node).shape[:-2])
        return cls(sizes=sizes, given=sizes)

    def after(self, view: fx.Node, left: fx.Node) -> Frame:
        """The frame after a view; `left` has the leading axes of the product."""
        new = Frame.of(view)
        written = argument(view, 1, "size")
        if not isinstance(written, (list, tuple)) or len(written) != len(new.sizes) + 2 or not new.sizes:
            return new
        given = [*written[: len(new.sizes)]]
        if given[0] == -1:  # windows: view(−1, windows, heads, rows, columns)
            lead, rest = tensor_of(left).shape[:-2], math.prod(new.sizes[1:])
            known = (
                len(lead) == 2 and isinstance(rest, int) and isinstance(lead[1], int) and rest % lead[1] == 0
            )
            given[0] = SizeOf(left, 0, rest // lead[1]) if known else new.sizes[0]
        return Frame(
            sizes=new.sizes, given=tuple(s if w == -1 else w for s, w in zip(new.sizes, given, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the leading axes of the scores are read as [B, H].

    Attributes:
        lead: leading axes of q·kᵀ in the graph: any number.
        cut: with three and more, how many of them make B; the rest make H.
        heads: with one, [B·H], how many heads it holds; 1 where nothing tells.
    """

    lead: tuple[Any, ...]
    cut: int = 1
    heads: int = 1

    @property
    def batch_and_heads(self) -> tuple[Any, Any]:
        if len(self.lead) == 0:
            return 1, 1
        if len(self.lead) == 1:
            return self.lead[0] // self.heads, self.heads
        return math.prod(self.lead[: self.cut]), math.prod(self.lead[self.cut :])

    def split(self, value: Operand, frame: Frame) -> Operand:
        """A value that broadcasts to [*frame, rows, columns] as one that broadcasts to [B, H,
        rows, columns].
        """
        while len(value.shape) < len(frame.sizes) + 2:
            value = value.then(aten.unsqueeze.default, 0)
        if len(frame.sizes) == 0:
            return value.then(aten.unsqueeze.default, 0).then(aten.unsqueeze.default, 0)
        if len(frame.sizes) == 1:
            if same(value.shape[0], 1):
                return value.then(aten.unsqueeze.default, 0)
            heads = self.batch_and_heads[1]
            return (
                value.then(aten.unsqueeze.default, 1)
                if same(heads, 1)
                else value.then(aten.unflatten.int, 0, [-1, heads])
            )
        cut = self._cut_of(frame)
        return _merged(_merged(value, frame, cut, len(frame.sizes)), frame, 0, cut)

    def restore(self, node: fx.Node) -> tuple[AxisStep, ...]:
        """From [B, H, S, V] back to the axes of `node`."""
        return self.restore_lead(Frame.of(node))

    def restore_lead(self, frame: Frame) -> tuple[AxisStep, ...]:
        if len(frame.sizes) == 0:
            return (AxisStep(aten.squeeze.dim, (0,)), AxisStep(aten.squeeze.dim, (0,)))
        if len(frame.sizes) == 1:
            return (AxisStep(aten.flatten.using_ints, (0, 1)),)
        cut = self._cut_of(frame)
        return (*_parted(frame, cut, len(frame.sizes), 1), *_parted(frame, 0, cut, 0))

    def _cut_of(self, frame: Frame) -> int:
        """How many leading axes of another frame make B."""
        batch, heads = self.batch_and_heads
        if len(frame.sizes) == len(self.lead) == 2 and same(frame.sizes[1], heads):
            return 1
        usual = self.cut if len(frame.sizes) == len(self.lead) else len(frame.sizes) - 1
        for cut in (usual, *range(len(frame.sizes), -1, -1)):
            if same(math.prod(frame.sizes[:cut]), batch) and same(math.prod(frame.sizes[cut:]), heads):
                return cut
        raise NotThisFormError("its scores are re-arranged between the products")


def _merged(value: Operand, frame: Frame, start: int, stop: int) -> Operand:
    """Axes start … stop − 1 as one."""
    if stop == start:
        return value.then(aten.unsqueeze.default, start)
    if stop - start == 1:
        return value
    axes = value.shape[start:stop]
    if not all(same(axis, 1) for axis in axes) and not same_shape(axes, frame.sizes[start:stop]):
        whole = [frame.given[axis] if start <= axis < stop else -1 for axis in range(len(value.shape))]
        value = value.then(aten.expand.default, whole)
    return value.then(aten.flatten.using_ints, start, stop - 1)


def _parted(frame: Frame, start: int, stop: int, axis: int) -> tuple[AxisStep, ...]:
    """One axis as axes start … stop − 1 of a frame."""
    if stop - start == 1:
        return ()
    if stop == start:
        return (AxisStep(aten.squeeze.dim, (axis,)),)
    return (AxisStep(aten.unflatten.int, (axis, [-1, *frame.given[start + 1 : stop]])),)


def operand(
    node: fx.Node,
    heads: Heads,
    frame: Frame,
    *,
    swapped: bool = False,
    scalable: bool = False,
    group: bool = True,
) -> tuple[Operand, float]:
    """The operand of a product as [B|1, H|K, rows, columns], and the number that was multiplied into it.

    Args:
        node: the operand in the graph.
        heads: how the leading axes of the scores are read.
        frame: those of the product.
        swapped: the node is [..., columns, rows].
        scalable: numbers multiplied in may be taken out.
        group: heads that were repeated are given once.
    """
    count = heads.batch_and_heads[1]
    factor = 1.0
    while True:
        source = source_of(node)
        found = None if source is None else _beyond(node, source, heads, swapped)
        if found is not None:
            node = found
        elif source is not None and swaps_last_two(node):
            node, swapped = source, not swapped
        elif source is not None and scalable and (times := _times(node)) is not None:
            node, factor = source, factor * times
        elif group and not swapped and (fewer := _ungrouped(node, count)) is not None:
            value = fewer
            break
        else:
            value = Operand.of(node)
            break
    if swapped:
        value = value.then(aten.transpose.int, -2, -1)
    if (
        group
        and len(frame.sizes) == 3
        and heads.cut == 1
        and len(value.shape) == 5
        and same(value.shape[2], 1)
    ):
        return value.then(aten.squeeze.dim, 2), factor  # [B, K, 1, rows, columns], read by groups of queries
    # the views that merged batch and heads are undone already
    merged = len(frame.sizes) == 1 and len(value.shape) == 4
    return value if merged else heads.split(value, frame), factor


def _beyond(node: fx.Node, source: fx.Node, heads: Heads, swapped: bool) -> fx.Node | None:
    """The value before a copy, a widening cast, or the views that merge the heads into the batch."""
    if moves_nothing(node):
        return source
    if node.target in CASTS and _widens(source, node):
        return source
    val = node.meta.get("val")
    if node.target in RESHAPES and isinstance(val, Tensor) and val.ndim == 3 and len(heads.lead) == 1:
        wanted = (*heads.batch_and_heads, *val.shape[-2:])
        return next((n for n in _reshaped(node) if same_shape(tensor_of(n).shape, wanted)), None)
    return None


def _reshaped(node: fx.Node) -> Iterator[fx.Node]:
    """The values before reshapes and copies: the same elements in the same order."""
    while (node.target in RESHAPES | COPIES or moves_nothing(node)) and (
        source := source_of(node)
    ) is not None:
        node = source
        yield node


def heads_of(node: fx.Node) -> int | None:
    """The number of heads in [B·H, rows, columns], where it was or will be [B, H, rows, columns]."""
    rows = tensor_of(node).shape[-2:]
    for other in (*_before(node), *(user for user in node.users if user.target in RESHAPES)):
        val = other.meta.get("val")
        kept = (
            isinstance(val, Tensor)
            and val.ndim == 4
            and (same_shape(val.shape[-2:], rows) or same_shape(val.shape[:-3:-1], rows))
        )
        if kept and isinstance(val, Tensor) and isinstance(val.shape[1], int):
            return int(val.shape[1])
    return None


def _before(node: fx.Node) -> Iterator[fx.Node]:
    """The values before views, transposes and scalings."""
    while (source := source_of(node)) is not None:
        if not (
            node.target in RESHAPES | COPIES | CASTS
            or moves_nothing(node)
            or swaps_last_two(node)
            or _times(node) is not None
        ):
            return
        node = source
        yield node


def _widens(source: fx.Node, node: fx.Node) -> bool:
    before, after = tensor_of(source).dtype, tensor_of(node).dtype
    return (
        before.is_floating_point and after.is_floating_point and torch.promote_types(before, after) == after
    )


def _times(node: fx.Node) -> float | None:
    """c of value · c or value / (1/c)."""
    if (
        node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
        and "rounding_mode" not in node.kwargs
    ):
        by = number(node.args[1])
        if by is not None and not (by == 0 and node.target in (aten.div.Tensor, aten.div.Scalar)):
            return 1.0 / by if node.target in (aten.div.Tensor, aten.div.Scalar) else by
    return None


def _ungrouped(node: fx.Node, heads: object) -> Operand | None:
    """[B, K, T, D], if the node repeats it K → H, each head H/K times in a row."""
    val = tensor_of(node)
    source = source_of(node)
    if source is None or val.ndim != 4 or not same(val.shape[1], heads) or same(heads, 1):
        return None
    if node.target is aten.repeat_interleave.self_int:
        return Operand.of(source) if argument(node, 2, "dim") in (1, -3) else None
    if node.target is aten.expand.default:
        before = tensor_of(source).shape
        return (
            Operand.of(source)
            if len(before) == 4 and same_shape((before[0], *before[2:]), (val.shape[0], *val.shape[2:]))
            else None
        )
    if node.target not in RESHAPES:
        return None
    while source.target in COPIES and (before_copy := source_of(source)) is not None:
        source = before_copy
    repeated, single = tensor_of(source).shape, source_of(source)
    if source.target is not aten.expand.default or single is None or len(repeated) != 5:
        return None
    kept = (repeated[0], repeated[1], 1, repeated[3], repeated[4])
    if (
        not same_shape(tensor_of(single).shape, kept)
        or not same_shape(repeated[3:], val.shape[2:])
        or not same(repeated[0], val.shape[0])
    ):
        return None
    grouped = source_of(single)
    if single.target is aten.unsqueeze.default and grouped is not None and single.args[1] in (2, -3):
        return Operand.of(grouped)
    return Operand.of(single).then(aten.squeeze.dim, 2)


def one_dtype(operands: Sequence[Operand]) -> list[Operand]:
    """All in the widest of their dtypes."""
    dtype = operands[0].val.dtype
    for other in operands[1:]:
        dtype = torch.promote_types(dtype, other.val.dtype)
    return [o if o.val.dtype == dtype else o.then(aten.to.dtype, dtype) for o in operands]


def with_batch(value: Operand, like: Operand) -> Operand:
    """The operand with its batch axis spread to that of another."""
    if same(value.shape[0], like.shape[0]):
        return value
    return value.then(
        aten.expand.default, [SizeOf(like.node, 0) if not like.steps else like.shape[0], -1, -1, -1]
    )
