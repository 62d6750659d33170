"""The normal form of an attention: softmax(softcap(q·kᵀ·scale) + terms)·v, its operands as views of values in
the graph.

Axes: B batch, H query heads, K key/value heads (H a multiple of K), S queries, T keys, D and V head sizes of
q·k and of v.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core import torch_compat
from effcompile.core.reasons import ReasonError, Unsupported
from effcompile.core.types import Args, Value

Target = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of an axis of a value, divided by a number: a number where it is known, a `sym_size` node
    where it is dynamic.
    """

    node: fx.Node
    axis: int
    divisor: int = 1

    @property
    def now(self) -> Value:
        """At the example."""
        return tensor_of(self.node).shape[self.axis] // self.divisor


@dataclass(frozen=True, slots=True)
class AxisStep:
    """One further operator on a value; `args` follow the value and may hold SizeOf and Operand."""

    target: Target
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """A value of the graph after `steps`, which are not in the graph until `rewrite` puts them there.

    Attributes:
        node: what is in the graph.
        val: fake tensor of the result: its shape and dtype.
        steps: views, mostly; a scale per row, a cast.
    """

    node: fx.Node
    val: Tensor
    steps: tuple[AxisStep, ...] = ()

    @classmethod
    def of(cls, node: fx.Node) -> Operand:
        return cls(node=node, val=tensor_of(node))

    def then(self, target: Target, *args: object) -> Operand:
        """The operand after one more operator."""
        with faking(self.val):
            val = target(self.val, *fx.map_arg(_plain(args), lambda node: node.meta["val"]))
        return replace(self, val=val, steps=(*self.steps, AxisStep(target, args)))

    @property
    def shape(self) -> Args:
        return tuple(self.val.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """`factor · value` is added to the scores.

    Attributes:
        value: [B|1, H|1, S|1, T|1].
        kind: "mask" if it reaches no parameter and no activation, so that it can be evaluated without the
            model; else "bias".
    """

    value: Operand
    kind: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fill:
    """Where `value` is `hidden`, the scores with the terms before it become `fill`.

    Attributes:
        value: bool, [B|1, H|1, S|1, T|1].
        hidden: True: True is hidden (`masked_fill`); False: True is visible (`where`, SDPA's bool mask).
        fill: −1e4 or less, or −inf.
        kind: as in Term.
        added: `fill` was added to the scores, and is so large that nothing of them is left. Where a row sees
            nothing, its scores then have a gradient; overwritten ones have none.
    """

    value: Operand
    hidden: bool
    fill: float
    kind: str
    added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMatch:
    """An attention in a graph.

    Attributes:
        site: qualified name of the module it stands in.
        anchor: the softmax, or the `scaled_dot_product_attention`.
        q, k, v: [B, H, S, D], [B, K, T, D], [B, K, T, V]; of one dtype.
        scale: factor of q·kᵀ. `softcap`: c of c·tanh(x / c) on the scaled scores, 0 for none.
        edits: what is added to the scores and filled into them, in order.
        sink: [H], or [B|1, H|1, S|1]: one more logit per row, with no value. None: there is none.
        causal: query i sees keys j ≤ i, whatever S and T are (SDPA's `is_causal`).
        empty: what a row gets that sees nothing: "uniform" (the mean of v: finite fills) or "zero" (SDPA);
            −inf gives NaN in eager.
        dropout: rate on the weights; 0 outside training.
        output: the product with v. `restore`: steps from [B, H, S, V] back to its shape and dtype.
        weights: the weights' node, if anyone else reads them.
        inner: every node from the scores to the output.
    """

    site: str
    anchor: fx.Node
    q: Operand
    k: Operand
    v: Operand
    scale: float
    output: fx.Node
    inner: tuple[fx.Node, ...]
    restore: tuple[AxisStep, ...] = ()
    softcap: float = 0.0
    edits: tuple[Term | Fill, ...] = ()
    sink: Operand | None = None
    causal: bool = False
    empty: str = "uniform"
    dropout: float = 0.0
    weights: fx.Node | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, Term))

    @property
    def fills(self) -> tuple[Fill, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, Fill))

    @property
    def grouped(self) -> bool:
        """Several query heads read one key/value head."""
        return not same(self.q.shape[1], self.k.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unmatched:
    """A softmax, or an attention, that is left as it is, and why."""

    node: fx.Node
    site: str
    reason: Unsupported


class NotThisFormError(ReasonError):
    """Raised inside the match, with the reason of an Unmatched."""


def faking(val: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which operators on `val` have shapes and no data."""
    return getattr(val, "fake_mode", None) or contextlib.nullcontext()


def tensor_of(node: fx.Node) -> Tensor:
    """The fake tensor of a node.

    Raises:
        NotThisFormError: it is no tensor, or was never given a shape.
    """
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        raise NotThisFormError("{} has no known shape", node.name)
    return val


def same(a: object, b: object) -> bool:
    """Whether two sizes are equal by what is known, without a new guard."""
    return bool(torch_compat.expression(a) == torch_compat.expression(b))


def same_shape(a: Args | torch.Size, b: Args | torch.Size) -> bool:
    """Whether all sizes of two shapes are."""
    return len(a) == len(b) and all(map(same, a, b))


def _plain(args: object) -> Value:
    """Arguments with sizes and operands as what they stand for now."""
    if isinstance(args, SizeOf):
        return args.now
    if isinstance(args, Operand):
        return args.val
    return type(args)(_plain(a) for a in args) if isinstance(args, (tuple, list)) else args
