"""Positions in a graph: which integers of a mask's computation are a·i + b·j + c of the query i and the key
j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from effcompile.ir.program import shape_of

aten = torch.ops.aten
_SAME = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
_COPY = (aten._to_copy.default, aten.to.dtype)
_MIRROR = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
_COMPARE = {
    getattr(getattr(aten, name), overload): name for name in _MIRROR for overload in ("Tensor", "Scalar")
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """by_axis[0]·j + by_axis[1]·i + … + offset; axes are counted from the last one, so that broadcasting
    keeps them.
    """

    by_axis: tuple[float, ...] = ()
    offset: float = 0.0

    def plus(self, other: Affine, sign: float = 1.0) -> Affine:
        length = max(len(self.by_axis), len(other.by_axis))
        mine, theirs = ((*a.by_axis, *(0.0,) * (length - len(a.by_axis))) for a in (self, other))
        return Affine(
            by_axis=tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
            offset=self.offset + sign * other.offset,
        )

    def times(self, factor: float) -> Affine:
        return Affine(by_axis=tuple(a * factor for a in self.by_axis), offset=self.offset * factor)

    @property
    def key(self) -> float:
        return self.by_axis[0] if self.by_axis else 0.0

    @property
    def query(self) -> float:
        return self.by_axis[1] if len(self.by_axis) > 1 else 0.0

    @property
    def deeper(self) -> bool:
        """It varies along a batch or a head."""
        return any(self.by_axis[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """lo ≤ j − i ≤ hi; None = open."""

    lo: int | None = None
    hi: int | None = None


def affine(value: object) -> Affine | None:
    """What a node (or a number) is of positions; None where it is nothing so simple. Holds at every size."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Affine(offset=float(value))
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    target, args = value.target, value.args
    if target in _SAME or target is aten.expand.default:
        return affine(args[0])
    if target in _COPY:
        dtype = value.meta["val"].dtype
        return affine(args[0]) if dtype in (torch.int64, torch.int32, torch.float32, torch.float64) else None
    if target is aten.arange.default and not isinstance(args[0], float):
        return Affine(by_axis=(1.0,))
    if target is aten.arange.start and isinstance(args[0], int):
        return Affine(by_axis=(1.0,), offset=args[0])
    if target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        return _moved(value)
    return _arithmetic(value)


def _moved(node: fx.Node) -> Affine | None:
    """`unsqueeze`, or a view that moves the only axis that is longer than 1."""
    inner = affine(node.args[0])
    source = node.args[0]
    if inner is None or not isinstance(source, fx.Node):
        return None
    rank = len(source.meta["val"].shape)
    if node.target is aten.unsqueeze.default:
        axis = int(node.args[1]) % (rank + 1)  # type: ignore[arg-type]
        from_end = rank - axis
        padded = (*inner.by_axis, *(0.0,) * (rank - len(inner.by_axis)))
        return replace(inner, by_axis=(*padded[:from_end], 0.0, *padded[from_end:]))
    long = [axis for axis, size in enumerate(reversed(shape_of(node))) if size != 1]
    if rank != 1 or len(long) != 1:
        return None
    return replace(inner, by_axis=(*(0.0,) * long[0], inner.key))


def _arithmetic(node: fx.Node) -> Affine | None:
    """Sums and multiples of positions."""
    args = node.args
    if (
        node.target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
        and not node.kwargs
    ):
        a, b = affine(args[0]), affine(args[1])
        sign = 1.0 if node.target in (aten.add.Tensor, aten.add.Scalar) else -1.0
        return a.plus(b, sign) if a is not None and b is not None else None
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(args[1], (int, float)):
        inner = affine(args[0])
        return inner.times(args[1]) if inner is not None else None
    if node.target is aten.neg.default:
        inner = affine(args[0])
        return inner.times(-1.0) if inner is not None else None
    return None


def band_of(node: fx.Node, positive: bool) -> list[Band] | None:
    """The band in which a comparison of positions holds (positive) or does not; None where it is no such
    comparison.
    """
    name = _COMPARE.get(node.target)
    if name is None:
        return None
    if not positive:
        name = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}[name]
    left, right = node.args[:2]
    for one, other, how in ((left, right, name), (right, left, _MIRROR[name])):
        size = affine(other)
        if (
            isinstance(one, fx.Node)
            and one.target is aten.abs.default
            and size is not None
            and not any(size.by_axis)
        ):
            inner = affine(one.args[0])
            if how not in ("le", "lt") or inner is None:  # outside of a window is no band
                return None
            return _joined(_half(inner.plus(size, -1.0), how), _half(inner.times(-1.0).plus(size, -1.0), how))
    a, b = affine(left), affine(right)
    return _joined(_half(a.plus(b, -1.0), name)) if a is not None and b is not None else None


def _joined(*halves: Band | None) -> list[Band] | None:
    return None if any(half is None for half in halves) else [half for half in halves if half is not None]


def _half(form: Affine, name: str) -> Band | None:
    """form (name) 0 as a band: form must be ±(j − i) + c."""
    if form.deeper or form.key + form.query != 0 or abs(form.key) != 1:
        always = {"le": False, "lt": False, "ge": form.offset >= 0, "gt": form.offset > 0}[name]
        rising = not form.deeper and min(form.key, form.query) >= 0  # positions begin at 0
        return Band() if always and rising else None
    if name in ("ge", "gt"):
        form, name = form.times(-1.0), _MIRROR[name]
    limit = -form.offset  # now ±(j − i) ≤ limit, or < it
    most = math.ceil(limit) - 1 if name == "lt" else math.floor(limit)
    return Band(hi=most) if form.key == 1 else Band(lo=-most)


def chunk_of(left: object, right: object) -> int | None:
    """c where the two sides are j // c and i // c (in either order); None else."""
    sides = [_quotient(side) for side in (left, right)]
    if sides[0] is None or sides[1] is None or sides[0][1] != sides[1][1]:
        return None
    plain = {
        (form.key, form.query, form.offset, form.deeper) for form, _ in (s for s in sides if s is not None)
    }
    return sides[0][1] if plain == {(1.0, 0.0, 0.0, False), (0.0, 1.0, 0.0, False)} else None


def _quotient(value: object) -> tuple[Affine, int] | None:
    if not isinstance(value, fx.Node):
        return None
    floor = value.target is aten.floor_divide.default or (
        value.target in (aten.div.Tensor_mode, aten.div.Scalar_mode)
        and value.kwargs.get("rounding_mode") == "floor"
    )
    if not floor or not isinstance(value.args[1], int):
        return None
    form = affine(value.args[0])
    return (form, value.args[1]) if form is not None else None
