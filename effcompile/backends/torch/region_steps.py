"""Nodes of a graph that take each token by itself, and attentions over a cache, as steps of a program
(ops/row_program.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.ir.program import dtype_of, shape_of
from effcompile.ops import few_rows, row_program
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.append import append
from effcompile.ops.cached_attention import FEW, MOST, cached_attention
from effcompile.ops.group_linear import group_linear
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.row_program import RowProgram, RowStep
from effcompile.sites.parts import argument

#: (heads, width) of a value that tells heads apart.
Heads = tuple[int, int]
#: Of a result: its place among what a program makes or among the caches, its heads, and whether it is a
#: cache.
Told = tuple[int, Heads | None, bool]

aten = torch.ops.aten
ours = torch.ops.effcompile


def constant(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """The tensor that a get_attr node reads."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value


class Builder:
    """Steps of a program, of nodes given in order.

    Attributes:
        caches: appends → the cache that each makes longer, in order.
        attentions: (mask, keys, values) of each, by number; the mask is -1 where all is seen.
    """

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[fx.Node], masks: Sequence[fx.Node],
        sources: Mapping[fx.Node, int],
    ) -> None:  # fmt: skip
        """`inputs`: values of rows; `masks`: those of attentions; `sources`: caches that are read alone, by
        number.
        """
        self._module, self._inputs, self._masks = module, inputs, masks
        self.caches: dict[fx.Node, int] = {}
        self._sources = sources
        self.attentions: list[tuple[int, int, int]] = []
        self._slots = {node: at for at, node in enumerate(inputs)}
        self._heads: dict[fx.Node, Heads] = {}
        self._front: set[fx.Node] = set()  # of those, whose heads are in front of the tokens
        self._norms: dict[fx.Node, tuple[int, int]] = {}
        self._widths = [shape_of(node)[-1] for node in inputs]
        self._steps: list[RowStep] = []

    def put(self, node: fx.Node) -> bool:
        """Add a node; False where no program has it."""
        if node.target is operator.getitem:
            made = self._norms[node.args[0]]  # type: ignore[index]
            if node.args[1] in (0, 1):
                self._slots[node] = made[node.args[1]]  # type: ignore[index]
            return node.args[1] in (0, 1) or not node.users
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target not in STEPS:
            return self._same(node, source)
        step = STEPS[node.target](self, node)
        if step is None or not row_program.has(step.kind):
            return False
        self._steps.append(step)
        return True

    def _same(self, node: fx.Node, source: fx.Node) -> bool:
        """The same values in another shape: heads apart, in front of the tokens or behind them, or side by
        side again.
        """
        if source not in self._slots:
            return False
        self._slots[node] = self._slots[source]
        if node.target is aten.transpose.int:
            if source not in self._heads:
                return False
            self._heads[node] = self._heads[source]
            if source not in self._front:
                self._front.add(node)
        elif node.target is aten.clone.default:
            if source in self._heads:
                self._heads[node] = self._heads[source]
                if source in self._front:
                    self._front.add(node)
        elif len(shape_of(node)) == 4 and source in self._front:
            heads, width = self._heads[node] = self._heads[source]
            self._front.add(node)
            return (shape_of(node)[1], shape_of(node)[3]) == (heads, width)
        elif len(shape_of(node)) == 4:
            self._heads[node] = shape_of(node)[2:]  # type: ignore[assignment]
            return source not in self._heads
        else:
            return source in self._heads and source not in self._front
        return True

    def tellable(self, node: fx.Node) -> bool:
        """Whether a result can be handed out: a longer cache, dense rows, or heads in front of the tokens."""
        return node in self.caches or (
            node in self._slots and (node not in self._heads or node in self._front)
        )

    def built(self, results: Sequence[fx.Node]) -> tuple[RowProgram, list[Told]]:
        """The program, and what each result is of what it makes."""
        slots = list(dict.fromkeys(self._slots[node] for node in results if node not in self.caches))
        told = [
            (self.caches[node], None, True)
            if node in self.caches
            else (slots.index(self._slots[node]), self._heads.get(node), False)
            for node in results
        ]
        return RowProgram(self._steps, len(self._inputs), self._widths, slots), told

    def slot(self, node: object) -> int:
        """Where a value is; -1 for none."""
        return self._slots[node] if isinstance(node, fx.Node) else -1

    def new(self, node: fx.Node, width: int) -> int:
        """A slot for what a node makes."""
        self._slots[node] = len(self._widths)
        self._widths.append(width)
        return self._slots[node]

    def linear(self, node: fx.Node) -> RowStep | None:
        """One with codes."""
        names = ("weight", "bias") if node.target is group_linear.default else ("weight", "scales", "bias")
        given = {name: argument(node, name) for name in ("x", "after", *names)}
        if dtype_of(node) != torch.float32:
            return None
        if any(isinstance(given[name], fx.Node) and given[name].op != "get_attr" for name in names):  # type: ignore[attr-defined]
            return None
        held = {
            name: constant(self._module, each) if isinstance(each := given[name], fx.Node) else None
            for name in names
        }
        k, n = shape_of(given["x"])[-1], shape_of(node)[-1]  # type: ignore[arg-type]
        kind = row_program.GROUPS if node.target is group_linear.default else row_program.BYTES
        constants = (held["weight"], held.get("scales"), held["bias"])
        return RowStep(
            kind=kind,
            a=self.slot(given["x"]),
            out=self.new(node, n),
            n=n,
            k=k,
            constants=constants,
            after=str(given["after"]),
        )

    def wide(self, node: fx.Node) -> RowStep:
        """One in fp32."""
        x, *held = node.args
        weight, bias, *_ = (*self._held(*held), None)
        n, k = weight.shape  # type: ignore[union-attr]
        return RowStep(
            kind=row_program.WIDE,
            a=self.slot(x),
            out=self.new(node, n),
            n=n,
            k=k,
            constants=(weight, None, bias),
        )

    def layer_norm(self, node: fx.Node) -> RowStep | None:
        """Of one value, or of a sum that nothing else reads."""
        pair = node.target is add_layer_norm.default
        x, residual = argument(node, "x" if pair else "input"), argument(node, "residual") if pair else None
        weight, bias = self._held(argument(node, "weight"), argument(node, "bias"))
        n, eps = shape_of(node)[-1], argument(node, "eps")
        if not isinstance(eps, float) or any(
            each is not None and (each.shape != (n,) or not few_rows.takes(each)) for each in (weight, bias)
        ):
            return None
        return RowStep(
            kind=row_program.LAYER_NORM,
            a=self.slot(x),
            b=self.slot(residual),
            out=self.new(node, n),
            n=n,
            constants=(weight, None, bias),
            eps=eps,
        )

    def follow(self, node: fx.Node) -> RowStep | None:
        """A function of each number."""
        name = {aten.relu.default: "relu", aten.silu.default: "silu", aten.gelu.default: "gelu"}[node.target]  # type: ignore[index]
        if node.kwargs.get("approximate") == "tanh":
            name = "gelu_tanh"
        n = shape_of(node)[-1]
        return RowStep(
            kind=row_program.FOLLOW, a=self.slot(node.args[0]), out=self.new(node, n), n=n, after=name
        )

    def _held(self, *nodes: object) -> list[Tensor | None]:
        return [constant(self._module, each) if isinstance(each, fx.Node) else None for each in nodes]

    def norm(self, node: fx.Node) -> RowStep | None:
        """With the residual sum, which it makes too, or of one value."""
        x, *rest, weight, eps = node.args
        n = shape_of(x)[-1]  # type: ignore[arg-type]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr" or not isinstance(eps, float):
            return None
        held, out = (constant(self._module, weight),), self.new(node, n)
        more = -1
        if rest:
            more = len(self._widths)
            self._widths.append(n)
            self._norms[node] = (out, more)
        return RowStep(
            kind=row_program.NORM,
            a=self.slot(x),
            b=self.slot(rest[0] if rest else None),
            out=out,
            more=more,
            n=n,
            constants=held,
            eps=eps,
        )

    def pair(self, node: fx.Node) -> RowStep:
        """Of two values of one shape, or of one and a number or a row."""
        x, other = node.args
        n = shape_of(node)[-1]
        if isinstance(other, int | float):
            return RowStep(
                kind=row_program.SCALE, a=self.slot(x), out=self.new(node, n), n=n, eps=float(other)
            )
        if other not in self._slots:
            return RowStep(
                kind=row_program.SHIFT,
                a=self.slot(x),
                out=self.new(node, n),
                n=n,
                constants=(None, None, *self._held(other)),
            )
        kinds: dict[Any, int] = {
            ours.swiglu.default: row_program.GATE,
            aten.add.Tensor: row_program.ADD,
            aten.mul.Tensor: row_program.MULTIPLY,
        }
        kind = kinds[node.target]
        return RowStep(kind=kind, a=self.slot(x), b=self.slot(other), out=self.new(node, n), n=n)

    def turn(self, node: fx.Node) -> RowStep | None:
        """Of heads that were told apart inside."""
        x, cos, sin = node.args[:3]
        if x not in self._front or cos not in self._inputs or sin not in self._inputs:
            return None
        heads, width = self._heads[x]  # type: ignore[index]
        made = self.new(node, heads * width)
        self._heads[node] = (heads, width)
        self._front.add(node)
        return RowStep(
            kind=row_program.TURN,
            a=self.slot(x),
            b=self.slot(cos),
            more=self.slot(sin),
            out=made,
            n=heads,
            k=width // 2,
        )

    def append(self, node: fx.Node) -> RowStep | None:
        """Rows at the end of a cache."""
        _, new, _ = node.args
        if new not in self._front:
            return None
        heads, width = self._heads[new]  # type: ignore[index]
        self.caches[node] = len(self.caches)
        return RowStep(
            kind=row_program.APPEND, a=self.slot(new), b=self.caches[node], out=-1, n=heads, k=width
        )

    def attention(self, node: fx.Node) -> RowStep | None:
        """Over two of these caches."""
        query, keys, values, mask, scale = node.args
        read = {**self.caches, **self._sources}
        if query not in self._front or keys not in read or values not in read:
            return None
        heads, width = self._heads[query]  # type: ignore[index]
        held = shape_of(keys)  # type: ignore[arg-type]
        if held != shape_of(values) or held[3] != width or heads // held[1] * FEW > MOST:  # type: ignore[arg-type]
            return None
        made, of = self.new(node, heads * width), (read[keys], read[values])  # type: ignore[index]
        self._heads[node] = (heads, width)
        self._front.add(node)
        hidden = self._masks.index(mask) if isinstance(mask, fx.Node) else -1
        self.attentions.append((hidden, of[0], of[1]))
        size = width**-0.5 if scale is None else float(scale)  # type: ignore[arg-type]
        return RowStep(
            kind=row_program.ATTEND,
            a=self.slot(query),
            b=of[0],
            more=of[1],
            out=made,
            n=heads,
            k=width,
            mask=hidden,
            eps=size,
        )


STEPS: dict[object, Callable[[Builder, fx.Node], RowStep | None]] = {
    group_linear.default: Builder.linear,
    int8_linear.default: Builder.linear,
    ours.rms_norm.default: Builder.norm,
    ours.rms_norm_alone.default: Builder.norm,
    ours.swiglu.default: Builder.pair,
    ours.rotary.default: Builder.turn,
    aten.add.Tensor: Builder.pair,
    aten.mul.Tensor: Builder.pair,
    few_rows.linear: Builder.wide,
    aten.layer_norm.default: Builder.layer_norm,
    add_layer_norm.default: Builder.layer_norm,
    aten.relu.default: Builder.follow,
    aten.silu.default: Builder.follow,
    aten.gelu.default: Builder.follow,
    append: Builder.append,
    cached_attention: Builder.attention,
}
#: What changes the shape alone.
SHAPES = (aten.view.default, aten.reshape.default, aten.transpose.int, aten.clone.default)
