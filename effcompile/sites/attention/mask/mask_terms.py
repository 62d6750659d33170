"""A mask's computation taken apart: the conditions that must all hold for a key to be seen, by the operators
that joined them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from effcompile.sites.attention.find.fx_queries import FILLS, WHERES, ZEROS
from effcompile.sites.attention.mask.positions import Band, band_of, chunk_of

aten = torch.ops.aten
#: What is added to a score so that its weight is zero beyond doubt, whatever the score.
NEVER = -1e8
_SAME = (
    aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.expand.default,
    aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype,
)  # fmt: skip
_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_OR = (aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)
_MINUS = (aten.rsub.Scalar, aten.sub.Tensor)
_TESTS: dict[Any, Callable[[float, float], bool]] = {
    aten.lt.Scalar: lambda a, b: a < b, aten.le.Scalar: lambda a, b: a <= b, aten.gt.Scalar: lambda a,
    b: a > b, aten.ge.Scalar: lambda a, b: a >= b, aten.eq.Scalar: lambda a, b: a == b,
    aten.ne.Scalar: lambda a, b: a != b,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLeaf:
    """A condition that is taken no further apart: node is not 0 ("true"), is 0 ("false"), or is above NEVER
    ("kept").
    """

    node: fx.Node
    test: str


@dataclass(slots=True, kw_only=True)
class MaskTerms:
    """What was found: the conjunction of all of it, and what is added to the scores besides.

    Attributes:
        bands, chunks: closed forms, true at every size.
        pairs: (a, b, the comparison as a leaf): a == b element by element.
        leaves: other conditions.
        biases: nodes that are added to the scores where a key is seen.
        fills: (what was added or written where it is not, the dtype).
        zero_one: nodes that are taken to hold only 0 and 1.
        summed: fills were added to fills, so that keys may be hidden more or less.
    """

    bands: list[Band] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    pairs: list[tuple[fx.Node, fx.Node, MaskLeaf]] = field(default_factory=list)
    leaves: list[MaskLeaf] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)
    fills: list[tuple[float, torch.dtype]] = field(default_factory=list)
    zero_one: list[fx.Node] = field(default_factory=list)
    summed: bool = False

    def additive(self, node: fx.Node) -> None:
        """`node` is added to the scores."""
        target, args = node.target, node.args
        if number(node) == 0:
            return
        if (target in _SAME and _floats(node)) or _leads(node):
            self.additive(args[0])  # type: ignore[arg-type]
        elif target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in args):
            self.additive(args[0])  # type: ignore[arg-type]
            before = len(self.fills)
            self.additive(args[1])  # type: ignore[arg-type]
            self.summed = self.summed or 0 < before < len(self.fills)
        elif not (self._chosen(node) or self._multiplied(node) or self._triangle(node)):
            self.biases.append(node)

    def truth(self, value: Any, positive: bool) -> None:
        """`value` must be non-zero (positive) or zero."""
        constant = number(value)
        if constant is not None and bool(constant) is positive:
            return
        if not isinstance(value, fx.Node) or not self._taken_apart(value, positive):
            self.leaves.append(MaskLeaf(node=value, test="true" if positive else "false"))

    def _taken_apart(self, node: fx.Node, positive: bool) -> bool:
        """By its operator; False where that is none of ours, and nothing was noted."""
        target, args = node.target, node.args
        if (target in _SAME and node.op == "call_function" and _lossless(node)) or _leads(node):
            self.truth(args[0], positive)
        elif target in _NOT:
            self.truth(args[0], not positive)
        elif target in (_AND if positive else _OR) or (
            positive and target is aten.mul.Tensor and _integers(node)
        ):
            # 0/1 outer products
            self.truth(args[0], positive)
            self.truth(args[1], positive)
        elif (bands := band_of(node, positive)) is not None:
            self.bands += bands
        else:
            return (
                self._equal(node, positive)
                or self._two_valued(node, positive)
                or self._complement(node, positive)
            )
        return True

    def _equal(self, node: fx.Node, positive: bool) -> bool:
        """a == b, or not (a != b)."""
        if node.target is not (aten.eq.Tensor if positive else aten.ne.Tensor):
            return False
        left, right = node.args[:2]
        chunk = chunk_of(left, right)
        if chunk is not None:
            self.chunks.append(chunk)
            return True
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return False
        self.pairs.append((left, right, MaskLeaf(node=node, test="true" if positive else "false")))
        return True

    def _two_valued(self, node: fx.Node, positive: bool) -> bool:
        """A test of where(condition, a, b) with numbers a and b, or of its truth, is the condition or its
        opposite.
        """
        test = _TESTS.get(node.target)
        inner: Any = node.args[0] if test is not None else node
        if test is not None and not isinstance(node.args[1], (int, float)):
            return False
        while isinstance(inner, fx.Node) and inner.target in _SAME and _lossless(inner):
            inner = inner.args[0]
        if not isinstance(inner, fx.Node) or inner.target not in WHERES:
            return False
        condition, *choices = inner.args
        yes, no = (number(choice) for choice in choices)
        if yes is None or no is None:
            return False
        holds = [bool(v) if test is None else test(v, float(node.args[1])) for v in (yes, no)]  # type: ignore[arg-type]
        if holds[0] is holds[1]:
            return False
        self.truth(condition, holds[0] is positive)
        return True

    def _complement(self, node: fx.Node, positive: bool) -> bool:
        """1 − m is the opposite of m, which must then hold only 0 and 1."""
        if node.target not in _MINUS or node.kwargs:
            return False
        one, inner = (node.args[1], node.args[0]) if node.target is aten.rsub.Scalar else node.args[:2]
        if number(one) != 1 or not isinstance(inner, fx.Node):
            return False
        self.zero_one.append(inner)
        self.truth(inner, not positive)
        return True

    def _chosen(self, node: fx.Node) -> bool:
        """where or masked_fill with a fill on one side; the other is added."""
        if node.target in WHERES:
            condition, yes, no = node.args
        elif node.target in FILLS:
            no, condition, yes = node.args
        else:
            return False
        for fill, rest, positive in ((yes, no, False), (no, yes, True)):
            value = number(fill)
            if value is not None and is_fill(value):
                self.fills.append((value, node.meta["val"].dtype))
                self.truth(condition, positive)
                if isinstance(rest, fx.Node):
                    self.additive(rest)
                return True
        return False

    def _multiplied(self, node: fx.Node) -> bool:
        """m · fill hides where m is 1; m must hold only 0 and 1 (0 · −∞ would be NaN)."""
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            return False
        for factor, inner in (node.args[:2], node.args[1::-1]):
            value = number(factor)
            if value is not None and is_fill(value) and math.isfinite(value) and isinstance(inner, fx.Node):
                self.fills.append((value, node.meta["val"].dtype))
                if inner.target not in _MINUS:  # 1 − m holds 0 and 1 where m does, which is noted there
                    self.zero_one.append(inner)
                self.truth(inner, positive=False)
                return True
        return False

    def _triangle(self, node: fx.Node) -> bool:
        """triu(fill, d) hides j − i ≥ d, tril(fill, d) hides j − i ≤ d."""
        if node.target not in (aten.triu.default, aten.tril.default):
            return False
        value = number(node.args[0])
        if value is None or not is_fill(value):
            return False
        diagonal = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        self.fills.append((value, node.meta["val"].dtype))
        self.bands.append(
            Band(hi=diagonal - 1) if node.target is aten.triu.default else Band(lo=diagonal + 1)
        )
        return True


def is_fill(value: float) -> bool:
    """Whether adding this hides a key."""
    return value <= NEVER


def number(value: object) -> float | None:
    """The number that every element is; None where they are not known to be one."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return _constant(value)
    target, args = value.target, value.args
    if target in _SAME:
        return number(args[0])
    if target in ZEROS:
        return 0.0
    if target in (aten.ones.default, aten.ones_like.default, aten.new_ones.default):
        return 1.0
    if target is aten.scalar_tensor.default:
        return number(args[0])
    if target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return number(args[2] if target is aten.new_full.default else args[1])
    return None


def _constant(value: object) -> float | None:
    """A tensor of one element that the model holds and does not train."""
    if not isinstance(value, fx.Node) or value.op != "get_attr" or value.graph.owning_module is None:
        return None
    held: Any = value.graph.owning_module
    for part in str(value.target).split("."):
        held = getattr(held, part, None)
    plain = isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter) and held.numel() == 1
    return float(held) if plain else None


def _floats(node: fx.Node) -> bool:
    """A float that is made of a float."""
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and source.meta["val"].dtype.is_floating_point
        and node.meta["val"].dtype.is_floating_point
    )


def _leads(node: fx.Node) -> bool:
    """One more axis before all others: counted from the end, as masks broadcast, nothing has moved."""
    source = node.args[0] if node.target is aten.unsqueeze.default else None
    return isinstance(source, fx.Node) and node.args[1] in (0, -1 - source.meta["val"].ndim)


def _integers(node: fx.Node) -> bool:
    """bool or integers; that a product of masks wraps to 0 is left out of account."""
    return not node.meta["val"].dtype.is_floating_point and all(isinstance(a, fx.Node) for a in node.args)


def _lossless(node: fx.Node) -> bool:
    """A cast that makes nothing zero that was not."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return (
        after is torch.bool
        or before is torch.bool
        or before is after
        or (not before.is_floating_point and after.is_floating_point)
    )


def is_flag(node: fx.Node) -> bool:
    """Whether it holds only 0 and 1 by its type, or by that of what it was cast from."""
    while node.target in _SAME and node.op == "call_function" and node.meta["val"].dtype is not torch.bool:
        node = node.args[0]  # type: ignore[assignment]
    return node.meta["val"].dtype is torch.bool
