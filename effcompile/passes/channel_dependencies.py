"""Which channels of a graph live and die together: the rows and columns of linears that one hidden neuron or
one head is made of.

Every output row of every linear gets a label, an integer. Labels flow through the graph: operators that move
elements are run on labels themselves, what they do to shapes needs no rules; element-wise ones unite the
labels that they put together, and an attention those of a head. United labels are one unit, which can only be
removed whole (dependency graphs: Fang et al. 2301.12900, sec. 3). What this module does not understand pins
the units that it reads, with the reason.

Labels are tensors of their value's shape, expanded (stride 0) along every axis on which they do not depend,
so that they are small.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.reasons import Unsupported
from effcompile.core.types import Value
from effcompile.ir.program import Program, shape_of
from effcompile.sites.parts import LinearSite, argument, linears

aten = torch.ops.aten

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
EXPANDS = (aten.expand.default,)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_MOVING = (
    *SPLITS, aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.unbind.int, aten.flatten.using_ints,
    aten.repeat.default, aten.repeat_interleave.self_int,
)  # fmt: skip
_SAME = (
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.dropout.default,
)
#: operator → name of its argument that says along which axes it mixes.
_MIXING = {
    aten.mean.dim: "dim", aten.sum.dim_IntList: "dim", aten.amax.default: "dim", aten.softmax.int: "dim",
    aten._softmax.default: "dim", aten.layer_norm.default: "normalized_shape",
    aten.rms_norm.default: "normalized_shape",
}  # fmt: skip
_ATTENTION = (aten.scaled_dot_product_attention.default, torch.ops.effcompile.attention.default)

#: Labels of a value: of its shape, or one per result of an operator with several.
Labels = Tensor | tuple[Tensor | None, ...]


@dataclass(slots=True, kw_only=True)
class Line:
    """The one axis of a value along which its units lie, and the unit at each place of it.

    `first`: the unit at its beginning, which tells whose they are.
    """

    axis: int
    units: Tensor
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = int(self.units[0])


@dataclass(kw_only=True)
class Channels:
    """The units of a program's linears.

    Attributes:
        sites: linears by name.
        makes, reads: linear → the unit of each output row (N), of each input column (K).
        lines: value (and the number of the result) → where its units lie; absent where it has one unit only
            or none.
        pinned: unit → why it cannot be removed.
        constants: (operator, constant) → what an operator applies by channel.
        attended: units that are heads of an attention.
    """

    sites: dict[str, LinearSite]
    makes: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[str, Tensor] = field(default_factory=dict)
    lines: dict[tuple[fx.Node, int], Line] = field(default_factory=dict)
    pinned: dict[int, Unsupported] = field(default_factory=dict)
    constants: dict[tuple[fx.Node, fx.Node], Line] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)


def channels(program: Program) -> Channels:
    """Follow the labels of all linears through the graph. Nothing is run but integers."""
    flow = _Flow(program)
    for node in program.graph.nodes:
        flow.visit(node)
    return flow.result()


class _Flow:
    """Labels while they flow."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sites = {site.node: site for site in linears(program)}
        self.count = 0
        self.labels: dict[fx.Node, Labels] = {}
        self.makes: dict[str, Tensor] = {}
        self.reads: dict[str, Tensor] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.pins: list[tuple[Tensor, Unsupported]] = []
        # an element-wise operator, its labels, an operand without any
        self.foreign: list[tuple[fx.Node, Tensor, fx.Node]] = []
        self.heads: list[Tensor] = []

    def visit(self, node: fx.Node) -> None:
        found = self._linear(self.sites[node]) if node in self.sites else self._other(node)
        if found is not None:
            self.labels[node] = found

    def _other(self, node: fx.Node) -> Labels | None:
        given = [n for n in node.all_input_nodes if n in self.labels]
        if not given:
            return None
        target = node.target
        if target is operator.getitem:
            parts = self.labels[given[0]]
            assert isinstance(parts, tuple)
            return parts[node.args[1]]  # type: ignore[index]
        if any(isinstance(self.labels[n], tuple) for n in given) or node.op != "call_function":
            return self._pinned(given, node)
        if target in _ATTENTION:
            return self._attention(node)
        if target in VIEWS or target in EXPANDS:
            return _viewed(self._of(given[0]), shape_of(node), expanded=target in EXPANDS)
        if target in _MOVING:
            return self._moved(node, given[0])
        if target is aten.cat.default:
            return self._joined(node, given)
        if target in _MIXING:
            return self._mixed(node)
        if target in _SAME or (
            torch.Tag.pointwise in getattr(target, "tags", ()) and not target._schema.is_mutable  # type: ignore[union-attr]
        ):
            return self._pointwise(node, given)
        return self._pinned(given, node)

    # ------------------------------------------------------------------ operators

    def _linear(self, site: LinearSite) -> Tensor:
        if site.x in self.labels:
            x = self._of(site.x)
            first = x[(0,) * (x.dim() - 1)]
            self._unite(x, first.expand(x.shape))
            self.reads[site.site] = first
        rows = torch.arange(self.count, self.count + site.n)
        self.count += site.n
        self.makes[site.site] = rows
        if site.bias is not None and self.program.tensor(site.bias) is None:
            self.pins.append((rows, Unsupported("the bias of {site} is computed, not stored", (site.site,))))
        return rows.expand(shape_of(site.node))

    def _attention(self, node: fx.Node) -> Labels | None:
        """Query head h, key head h // (H / K) and the result's head h are one."""
        names = {p.name for p in node.target._schema.arguments}  # type: ignore[union-attr]
        made = [
            argument(node, name)
            for name in (("query", "key", "value") if "query" in names else ("q", "k", "v"))
        ]
        if not all(isinstance(n, fx.Node) and n in self.labels and len(shape_of(n)) == 4 for n in made):
            return self._pinned([n for n in node.all_input_nodes if n in self.labels], node)
        heads = []
        for value in made:
            labels = self._of(value)  # type: ignore[arg-type]
            head = labels[0, :, 0, 0]
            self._unite(labels, head[None, :, None, None].expand(labels.shape))
            heads.append(head)
        self.heads += heads
        queries, keys, values = heads
        per_key = len(queries) // len(keys)
        self._unite(queries, keys.repeat_interleave(per_key))
        self._unite(queries, values.repeat_interleave(per_key))
        for other in node.all_input_nodes:
            if other not in made and _differs_by_head(shape_of(other)):
                self.pins.append((queries, Unsupported("{name} differs by head", (other.name,))))
        shape = shape_of(node)
        out = queries[None, :, None, None].expand(shape)
        return (
            (out, queries[None, :, None].expand(shape[:3]))
            if isinstance(node.meta.get("val"), (tuple, list))
            else out
        )

    def _moved(self, node: fx.Node, source: fx.Node) -> Labels:
        given = [self._of(source) if arg is source else _plain(arg) for arg in node.args]
        found = node.target(*given, **{key: _plain(value) for key, value in node.kwargs.items()})  # type: ignore[operator]
        return tuple(found) if isinstance(found, (tuple, list)) else found

    def _joined(self, node: fx.Node, given: list[fx.Node]) -> Labels | None:
        parts: Any = node.args[0]
        if not all(part in self.labels for part in parts):
            return self._pinned(given, node)
        axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        axis %= len(shape_of(node))
        slim = _slim([self._of(part) for part in parts], but=axis)
        return torch.cat(slim, axis).expand(shape_of(node))

    def _mixed(self, node: fx.Node) -> Labels | None:
        """A sum or a norm along axes: along these, all are one unit."""
        source = node.args[0]
        axes = argument(node, _MIXING[node.target])  # type: ignore[index]
        if not isinstance(source, fx.Node) or source not in self.labels:
            return self._pinned([n for n in node.all_input_nodes if n in self.labels], node)
        labels = self._of(source)
        if _MIXING[node.target] == "normalized_shape":  # type: ignore[index]
            axes = list(range(-len(axes), 0))  # type: ignore[arg-type]
        one = labels
        for axis in range(labels.dim()) if axes is None else [axes] if isinstance(axes, int) else axes:  # type: ignore[attr-defined]
            one = one.narrow(axis, 0, 1)
        self._unite(labels, one.expand(labels.shape))
        for other in node.all_input_nodes:
            if other is not source:
                self.foreign.append((node, one.expand(labels.shape), other))
        shape = shape_of(node)
        return one.expand(shape) if one.dim() == len(shape) else _viewed(one, shape)

    def _pointwise(self, node: fx.Node, given: list[fx.Node]) -> Labels | None:
        shape = shape_of(node)
        first, *others = [self._of(n).expand(shape) for n in given]
        for other in others:
            self._unite(first, other)
        for operand in node.all_input_nodes:
            if operand in self.labels or not shape_of(operand):
                continue
            if self.program.tensor(operand) is None and _covers(shape_of(operand), first):
                return self._pinned(given, node)
            self.foreign.append((node, first, operand))
        return first

    # ------------------------------------------------------------------ bookkeeping

    def _of(self, node: fx.Node) -> Tensor:
        found = self.labels[node]
        assert isinstance(found, Tensor), f"{node} has several results"
        return found

    def _unite(self, left: Tensor, right: Tensor) -> None:
        a, b = (tensor.reshape(-1) for tensor in _slim([left, right]))
        differ = a != b
        self.pairs.append((a[differ], b[differ]))

    def _pinned(self, given: Sequence[fx.Node], node: fx.Node) -> Labels | None:
        """None, which is what flows on: what a node reads cannot be removed."""
        reason = Unsupported("{name} reads them, which is no element-wise operator", (node.name,))
        if node.op == "output":
            reason = Unsupported("the model returns them")
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            reason = Unsupported("{name} adds what no linear made to them", (node.name,))
        for one in given:
            labels = self.labels[one]
            for part in labels if isinstance(labels, tuple) else (labels,):
                if part is not None:
                    self.pins.append((_slim([part])[0].unique(), reason))
        return None

    # ------------------------------------------------------------------ units

    def result(self) -> Channels:
        unit = _components(self.count, self.pairs)
        found = Channels(sites={site.site: site for site in self.sites.values()})
        found.makes = {site: unit[labels] for site, labels in self.makes.items()}
        found.reads = {site: unit[labels] for site, labels in self.reads.items()}
        found.attended = {int(u) for labels in self.heads for u in unit[labels].unique()}
        for labels, reason in self.pins:
            _pin_units(found, unit[labels], reason)
        for node, flowed in self.labels.items():
            for number, part in enumerate(flowed if isinstance(flowed, tuple) else (flowed,)):
                if part is not None:
                    self._line(found, node, number, unit[_slim([part])[0]])
        for node, labels, operand in self.foreign:
            self._by_channel(found, node, unit[_slim([labels])[0]], operand)
        return found

    def _line(self, found: Channels, node: fx.Node, number: int, units: Tensor) -> None:
        axes = _varying(units)
        if len(axes) > 1:
            _pin_units(found, units, Unsupported("{name} has them along several axes", (node.name,)))
        elif axes:
            found.lines[node, number] = Line(axis=axes[0], units=units.movedim(axes[0], 0).flatten(1)[:, 0])

    def _by_channel(self, found: Channels, node: fx.Node, units: Tensor, operand: fx.Node) -> None:
        """What an operand without labels does to units: nothing where it is the same for all, else it is
        sliced, if it is a constant.
        """
        for axis in _varying(units):
            own = axis - units.dim() + len(shape_of(operand))
            if own < 0 or shape_of(operand)[own] == 1:
                continue
            if self.program.tensor(operand) is None or len(operand.users) > 1:
                _pin_units(found, units, Unsupported("{name} differs by channel", (operand.name,)))
            else:
                found.constants[node, operand] = Line(axis=own, units=units.movedim(axis, 0).flatten(1)[:, 0])


def _pin_units(found: Channels, units: Tensor, reason: Unsupported) -> None:
    for unit in units.unique().tolist():
        found.pinned.setdefault(unit, reason)


def _components(count: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Label → the smallest label that it is united with."""
    unit = torch.arange(count)
    if not pairs:
        return unit
    left, right = (torch.cat(side) for side in zip(*pairs, strict=True))
    while True:
        before = unit.clone()
        least = torch.minimum(unit[left], unit[right])
        for roots in (unit[left], unit[right]):  # hooking roots, not leaves: a chain is done in a few rounds
            unit.scatter_reduce_(0, roots, least, "amin")
        unit = unit[unit]
        if torch.equal(unit, before):
            return unit


def _slim(tensors: Sequence[Tensor], but: int = -1) -> list[Tensor]:
    """Tensors of one rank, cut to size 1 along axes on which none of them depends."""
    index = tuple(
        slice(None)
        if axis == but or any(t.stride(axis) and t.shape[axis] > 1 for t in tensors)
        else slice(0, 1)
        for axis in range(tensors[0].dim())
    )
    return [tensor[index] for tensor in tensors]


def _viewed(labels: Tensor, shape: tuple[int, ...], *, expanded: bool = False) -> Tensor:
    """Labels in another shape, without copying axes at either end that stay and say nothing."""
    if expanded:
        return labels.expand(shape)
    head = 0
    while (
        head < min(labels.dim(), len(shape)) and labels.shape[head] == shape[head] and not labels.stride(head)
    ):
        head += 1
    slim, wanted = labels[(slice(0, 1),) * head], [1] * head + list(shape[head:])
    tail = 1
    while tail <= min(labels.dim(), len(shape)) - head and slim.shape[-tail] == wanted[-tail]:
        if not slim.stride(-tail):
            slim, wanted[-tail] = slim.narrow(-tail, 0, 1), 1
        tail += 1
    return slim.reshape(wanted).expand(shape)


def _varying(units: Tensor) -> list[int]:
    """The axes that units depend on."""
    return [
        axis
        for axis, size in enumerate(units.shape)
        if size > 1 and bool((units != units.narrow(axis, 0, 1)).any())
    ]


def _covers(shape: tuple[int, ...], labels: Tensor) -> bool:
    """Whether an operand has an entry of its own for every label: it adds channels of another origin, as a
    residual does.
    """
    full = (1,) * (labels.dim() - len(shape)) + shape
    own = [
        (size, length)
        for size, length, stride in zip(full, labels.shape, labels.stride(), strict=True)
        if stride and length > 1
    ]
    return bool(own) and all(size == length for size, length in own)


def _differs_by_head(shape: tuple[int, ...]) -> bool:
    """Of an operand of an attention that is not q, k or v: masks are (..., H or 1, Sq, Sk), sinks (H); ids
    and lengths are (B, S).
    """
    return (len(shape) >= 3 and shape[-3] > 1) or len(shape) == 1


def _plain(value: Value) -> Value:
    """An argument with the sizes of the example in the place of symbolic ones."""

    def size(node: fx.Node) -> Value:
        value = node.meta.get("val")
        return int(value.node.hint) if isinstance(value, torch.SymInt) else value

    return fx.map_arg(value, size)
