"""From q·kᵀ to the softmax: the walk up to the product, and the way back down as scale, softcap, terms, fills
and sink.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from effcompile.sites.attention.find.added_masks import HIDING, added_mask
from effcompile.sites.attention.find.fx_queries import (
    CASTS,
    COPIES,
    FILLS,
    RESHAPES,
    WHERES,
    Learned,
    argument,
    aten,
    moves_nothing,
    number,
    overloads,
    source_of,
)
from effcompile.sites.attention.find.head_layout import Frame, Heads, heads_of
from effcompile.sites.attention.find.normal_form import (
    Fill,
    NotThisFormError,
    Operand,
    Term,
    same,
    same_shape,
    tensor_of,
)
from effcompile.sites.attention.find.products import MatchedProduct, is_product

_ADD = overloads("add.Tensor", "add_.Tensor", "add.Scalar", "add_.Scalar")
_SUB = overloads("sub.Tensor", "sub_.Tensor")
_MUL = overloads("mul.Tensor", "mul_.Tensor", "mul.Scalar", "mul_.Scalar")
_DIV = overloads("div.Tensor", "div_.Tensor", "div.Scalar", "div_.Scalar")
_TANH = overloads("tanh.default", "tanh_.default")
_FLOOR = overloads("maximum.default", "max.other", "clamp_min.default", "clamp_min.Tensor", "clamp.default")
_ONE_OPERAND = CASTS | COPIES | RESHAPES | FILLS | _TANH | _DIV | _FLOOR | {aten.expand.default}


def trail_to(node: fx.Node) -> list[fx.Node] | None:
    """The nodes from a product (first) to `node` (last), through operators that the normal form knows; None
    if there is no such way.
    """
    val = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(val, Tensor)
        or not val.is_floating_point()
        or val.ndim < 2
    ):
        return None
    if is_product(node):
        return [node]
    for candidate in _candidates(node):
        if (found := trail_to(candidate)) is not None:
            return [*found, node]
    return None


def _candidates(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that may hold the scores."""
    operands: tuple[Any, ...] = ()
    if node.target in _ONE_OPERAND:
        operands = node.args[:1]
    elif node.target in _ADD | _SUB | _MUL:
        operands = node.args[:2]
    elif node.target in WHERES:
        operands = node.args[1:3]
    elif node.target is aten.cat.default:
        operands = tuple(node.args[0])  # type: ignore[arg-type]
    yield from (o for o in operands if isinstance(o, fx.Node))


def stop_of(node: fx.Node) -> fx.Node:
    """Where the walk up from a softmax ends that finds no product: for the reason."""
    while (
        source := source_of(node) if node.target is operator.getitem else next(_candidates(node), None)
    ) is not None:
        node = source
    return node


@dataclass(slots=True, kw_only=True)
class ScoreWalk:
    """The state on the way down.

    `after`: factor since the tanh, None before one; `aside`: nodes beside the way that only it reads.
    """

    product: MatchedProduct
    heads: Heads
    frame: Frame
    learned: Learned
    scale: float = 1.0
    after: float | None = None
    edits: list[Term | Fill] = field(default_factory=list)
    row_factors: list[tuple[Any, Operand]] = field(default_factory=list)
    sink: Operand | None = None
    sink_first: bool = False
    aside: list[fx.Node] = field(default_factory=list)

    @classmethod
    def along(cls, trail: list[fx.Node], learned: Learned) -> ScoreWalk:
        """Walk down from the product.

        Raises:
            NotThisFormError: an operator on the way does what the normal form cannot say.
        """
        product = MatchedProduct.of(trail[0])
        if product.out_axes is not None:
            raise NotThisFormError(
                "{} is no product of queries with keys: its result has other axes than its operands",
                trail[0].name,
            )
        state = cls(
            product=product,
            heads=_heads(product, trail),
            frame=Frame.of(trail[0]),
            learned=learned,
            scale=product.alpha,
        )
        if product.added is not None:
            state.edits += state.added(product.added, product.beta)
        for before, node in itertools.pairwise(trail):
            state.step(before, node)
        return state

    @property
    def softcap(self) -> float:
        return 0.0 if self.after is None else self.after

    @property
    def whole_scale(self) -> float:
        """Factor of q·kᵀ itself: c · tanh(s · x) is softcap_c(s · c · x)."""
        return self.scale if self.after is None else self.scale * self.after

    def step(self, before: fx.Node, node: fx.Node) -> None:
        for targets, apply in _RULES:
            if node.target in targets:
                return apply(self, before, node)
        raise AssertionError(f"{node.target} is on the way and has no rule")

    def added(self, value: object, factor: float) -> list[Term | Fill]:
        """What is added: as a fill where it is one, `where(seen, 0, finfo.min)` as HF writes masks; else as
        it is.
        """
        assert isinstance(value, fx.Node)
        if factor > 0 and (mask := added_mask(value)) is not None:
            shaped = self.heads.split(Operand.of(mask.seen), self.frame)
            fill = Fill(
                value=shaped,
                hidden=mask.hidden,
                fill=mask.fill * factor,
                kind=self.learned.kind(mask.seen),
                added=True,
            )
            return [*(self.added(rest, factor) if (rest := mask.rest) is not None else []), fill]
        return [
            Term(
                value=self.heads.split(Operand.of(value), self.frame),
                factor=factor,
                kind=self.learned.kind(value),
            )
        ]

    # one rule per operator; `node` reads the scores `before`

    def copy(self, before: fx.Node, node: fx.Node) -> None:
        """Casts change the precision, which is fp32 in every kernel; copies nothing."""

    def reshape(self, before: fx.Node, node: fx.Node) -> None:
        old, new = tensor_of(before).shape, tensor_of(node).shape
        if len(new) < 2 or not same_shape(old[-2:], new[-2:]):
            raise NotThisFormError("{} re-arranges the scores' rows or columns", node.name)
        self.frame = self.frame.after(node, self.product.left)

    def expand(self, before: fx.Node, node: fx.Node) -> None:
        if not moves_nothing(node):
            raise NotThisFormError("{} repeats the scores", node.name)

    def add(self, before: fx.Node, node: fx.Node) -> None:
        first = node.args[0] is before
        other, alpha = node.args[1 if first else 0], float(argument(node, 2, "alpha", 1))
        if number(other) == 0.0 or (node.target in _SUB and first and self._is_maximum(other, before)):
            return
        self._before_sink(node)
        if not first and (node.target in _SUB or alpha != 1):
            raise NotThisFormError("{} scales or subtracts the scores", node.name)
        if not isinstance(other, fx.Node) or tensor_of(other).ndim == 0:
            raise NotThisFormError("{} adds a number to the scores", node.name)
        self._same_size(before, node)
        self.edits += self.added(other, -alpha if node.target in _SUB else alpha)

    def multiply(self, before: fx.Node, node: fx.Node) -> None:
        self._before_sink(node)
        other = node.args[1] if node.args[0] is before else node.args[0]
        by = number(other)
        inverse = node.target in _DIV
        if by is None:
            return self._by_row(before, node, other)
        if (inverse and (by == 0 or argument(node, 2, "rounding_mode") is not None)) or not math.isfinite(by):
            raise NotThisFormError("{} divides the scores by {}", node.name, by)
        self._factor(1.0 / by if inverse else by, node)

    def tanh(self, before: fx.Node, node: fx.Node) -> None:
        self._before_sink(node)
        if self.edits or self.after is not None:
            raise NotThisFormError("{} is a tanh of more than the scaled scores", node.name)
        self.after = 1.0

    def fill(self, before: fx.Node, node: fx.Node) -> None:
        self._filled(node.args[1], True, node.args[2], before, node)

    def where(self, before: fx.Node, node: fx.Node) -> None:
        shown = node.args[1] is before
        self._filled(node.args[0], not shown, node.args[2 if shown else 1], before, node)

    def floor(self, before: fx.Node, node: fx.Node) -> None:
        """Even max(scores, finfo.min) halves the gradient of a row that sees nothing."""
        raise NotThisFormError("{} clamps the scores", node.name)

    def cat(self, before: fx.Node, node: fx.Node) -> None:
        parts = list(node.args[0])  # type: ignore[arg-type]
        axis = argument(node, 1, "dim", 0)
        sink = parts[1] if parts[0] is before else parts[0]
        if (
            len(parts) != 2
            or axis % tensor_of(node).ndim != tensor_of(node).ndim - 1
            or not same(tensor_of(sink).shape[-1], 1)
        ):
            raise NotThisFormError(
                "{} puts something beside the scores that is not one sink per row", node.name
            )
        self._before_sink(node)
        self.sink_first = parts[0] is not before
        self.sink = self._per_head(sink)

    def _filled(self, mask: object, hidden: bool, value: object, before: fx.Node, node: fx.Node) -> None:
        self._before_sink(node)
        fill = number(value)
        if fill is None or fill > HIDING or (self.after is not None and self.after <= 0):
            raise NotThisFormError(
                "{} fills the scores with {}, which hides nothing",
                node.name,
                "a value" if fill is None else f"{fill:g}",
            )
        self._same_size(before, node)
        if not isinstance(mask, fx.Node):
            raise NotThisFormError("{} has no mask", node.name)
        shaped = self.heads.split(Operand.of(mask), self.frame)
        self.edits.append(Fill(value=shaped, hidden=hidden, fill=fill, kind=self.learned.kind(mask)))

    def _factor(self, by: float, node: fx.Node) -> None:
        """Scores and all that was added so far, times a number."""
        if any(isinstance(edit, Fill) for edit in self.edits) and by <= 0:
            raise NotThisFormError("{} turns the sign of masked scores", node.name)
        if self.after is None:
            self.scale *= by
        else:
            self.after *= by
        self.edits = [_times(edit, by) for edit in self.edits]

    def _by_row(self, before: fx.Node, node: fx.Node, other: Any) -> None:
        """Scores times a tensor that is one per row: as well q times it."""
        constant = not isinstance(other, fx.Node) or not isinstance(other.meta.get("val"), Tensor)
        if (
            constant
            or self.edits
            or self.after is not None
            or (node.target in _DIV and node.args[0] is not before)
        ):
            raise NotThisFormError("{} multiplies more than the scores by a tensor", node.name)
        self._same_size(before, node)
        factor = (
            self.heads.split(Operand.of(other), self.frame) if tensor_of(other).ndim else Operand.of(other)
        )
        if tensor_of(other).ndim and not same(factor.shape[-1], 1):
            raise NotThisFormError("{} weighs keys one by one", node.name)
        self.row_factors.append((aten.div.Tensor if node.target in _DIV else aten.mul.Tensor, factor))

    def _same_size(self, before: fx.Node, node: fx.Node) -> None:
        """An element-wise operator repeats what has size 1 and nothing else."""
        old, new = tensor_of(before).shape, tensor_of(node).shape
        if len(old) != len(new) or any(same(a, 1) and not same(b, 1) for a, b in zip(old, new, strict=True)):
            raise NotThisFormError("{} repeats the scores", node.name)

    def _before_sink(self, node: fx.Node) -> None:
        if self.sink is not None:
            raise NotThisFormError("{} changes the scores with their sink", node.name)

    def _is_maximum(self, other: object, scores: fx.Node) -> bool:
        """max(scores, −1, keepdim=True), which no softmax feels; its nodes are noted as read by
        nobody else.
        """
        if not isinstance(other, fx.Node):
            return False
        chain = [other]
        while (chain[-1].target in COPIES | CASTS | {aten.detach.default, operator.getitem}) and (
            source := source_of(chain[-1])
        ):
            chain.append(source)
        last = chain[-1]
        over = argument(last, 1, "dim")
        axis = over[0] if isinstance(over, (list, tuple)) and len(over) == 1 else over
        found = (
            last.target in (aten.max.dim, aten.amax.default)
            and source_of(last) is scores
            and bool(argument(last, 2, "keepdim", False))
        )
        if found and axis in (-1, tensor_of(scores).ndim - 1):
            self.aside += chain
            return True
        return False

    def _per_head(self, sink: fx.Node) -> Operand:
        """The sinks as [H] where they are one number per head, else [B|1, H|1, S|1]."""
        heads = self.heads.batch_and_heads[1]
        chain = [sink]
        while (
            chain[-1].target in RESHAPES | COPIES | CASTS | {aten.expand.default}
            and (source := source_of(chain[-1])) is not None
        ):
            chain.append(source)
        for value in reversed(chain):
            if same_shape(tensor_of(value).shape, (heads,)) and self._spread_over_heads(
                chain[: chain.index(value)], heads
            ):
                return Operand.of(value)
        return self.heads.split(Operand.of(sink), self.frame).then(aten.squeeze.dim, -1)

    def _spread_over_heads(self, chain: list[fx.Node], heads: object) -> bool:
        """Whether these views of [H] put it on the axis of the heads, and on no other."""
        shapes = [tensor_of(n).shape for n in chain if n.target in RESHAPES]
        return (
            all(len(shape) == 4 and same(shape[1], heads) and same(shape[2], 1) for shape in shapes)
            and len(self.heads.lead) == 2
        )


def _times(edit: Term | Fill, by: float) -> Term | Fill:
    if isinstance(edit, Term):
        return replace(edit, factor=edit.factor * by)
    fill = edit.fill * by
    if fill > HIDING:
        raise NotThisFormError("its masked scores are scaled to {}, which hides nothing", fill)
    return replace(edit, fill=fill)


def _heads(product: MatchedProduct, trail: list[fx.Node]) -> Heads:
    """How the product's leading axes make batch and heads."""
    lead = product.lead
    if len(lead) == 1:
        four = (tensor_of(node).shape for node in trail if tensor_of(node).ndim == 4)
        sides = (
            node
            for node in (product.left, product.right, product.added)
            if isinstance(node, fx.Node) and tensor_of(node).ndim == 3
        )
        hints = (*(shape[1] for shape in four), *(heads_of(node) for node in sides))
        heads = next((h for h in hints if isinstance(h, int)), 1)
        return Heads(lead=lead, heads=heads)
    if len(lead) < 3:
        return Heads(lead=lead)
    right = tensor_of(product.right).shape
    grouped = len(right) == len(lead) + 2 and same(right[-3], 1) and not same(lead[-1], 1)
    return Heads(lead=lead, cut=len(lead) - (2 if grouped else 1))


_RULES: tuple[tuple[frozenset[Any], Callable[[ScoreWalk, fx.Node, fx.Node], None]], ...] = (
    (CASTS | COPIES, ScoreWalk.copy),
    (RESHAPES, ScoreWalk.reshape),
    (frozenset({aten.expand.default}), ScoreWalk.expand),
    (_ADD | _SUB, ScoreWalk.add),
    (_MUL | _DIV, ScoreWalk.multiply),
    (_TANH, ScoreWalk.tanh),
    (FILLS, ScoreWalk.fill),
    (WHERES, ScoreWalk.where),
    (_FLOOR, ScoreWalk.floor),
    (frozenset({aten.cat.default}), ScoreWalk.cat),
)
