"""What lies between the attentions of a graph, as programs of rows (ops/row_program.py) for calls of few tokens.

A region is a run of operators that take each token by itself: norms, gates, rotations, linears with codes, sums. One call runs it where
there are few tokens; its operators run one by one where there are many, or another dtype or layout comes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.ir.program import dtype_of, shape_of
from effcompile.ops import row_program, rows_native
from effcompile.ops.group_linear import group_linear, group_linear_on_cpu
from effcompile.ops.int8_linear import int8_linear, int8_linear_on_cpu
from effcompile.ops.row_program import RowProgram, RowStep
from effcompile.sites.parts import argument

#: (heads, width) of a value that tells heads apart.
Heads = tuple[int, int]

aten = torch.ops.aten
ours = torch.ops.effcompile

#: Tokens up to which a region is one call.
FEW = 8
#: Fewer operators than this are left alone.
_LEAST = 2


class Region:
    """A region at work: values in, and sizes that views name; values out, in the order of its nodes."""

    def __init__(self, program: RowProgram, told: Sequence[tuple[int, Heads | None]], one_by_one: fx.GraphModule, values: int) -> None:
        """`told`: which result of the program each value is, and its heads; `values`: how many inputs are tensors, the first ones."""
        self._program, self._told, self._one_by_one, self._values = program, tuple(told), one_by_one, values
        self.__name__ = "region"

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """Itself: nothing in it changes."""
        return self

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        first, values = inputs[0].shape, inputs[: self._values]
        few = len(first) == 3 and 0 < first[0] * first[1] <= FEW
        if not few or not all(_dense(each, first) for each in values):
            found: Sequence[Tensor] = self._one_by_one(*inputs)
            return found
        made = self._program(*values)
        return [made[at] if heads is None else made[at].view(first[0], first[1], *heads).transpose(1, 2) for at, heads in self._told]


def _dense(value: Tensor, leading: torch.Size) -> bool:
    """Whether a program takes it: fp32, dense, a row for each token (or, of cos and sin, for each token of one row)."""
    fits = value.dim() == 3 and value.shape[1] == leading[1] and value.shape[0] in (1, leading[0])
    return fits and value.dtype is torch.float32 and value.is_contiguous() and not value.is_cuda


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """The module with its regions as calls of their own, and our other operators without torch's dispatcher.

    As it is where it has none of our operators, on a GPU, and where nothing can be compiled.
    """
    on_cpu = all(node.meta["val"].device.type == "cpu" for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    if not on_cpu or not any(node.target in _PLAIN for node in module.graph.nodes) or not row_program.available():
        return module
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    for found in list(_found(module, order)):
        _replace(module, found, order)
    module.graph.eliminate_dead_code()
    _direct(module.graph)
    module.graph.lint()
    module.recompile()
    return module


#: Our operators → the plain functions that they are on a CPU: a call of a custom operator takes longer than they do for one token.
_PLAIN: dict[object, Callable[..., object]] = {
    group_linear.default: group_linear_on_cpu,
    int8_linear.default: int8_linear_on_cpu,
    ours.rms_norm.default: rows_native.rms_norm,
    ours.rms_norm_alone.default: rows_native.rms_norm_alone,
    ours.swiglu.default: rows_native.swiglu,
    ours.rotary.default: rows_native.rotary,
}


def _direct(graph: fx.Graph) -> None:
    for node in graph.nodes:
        read = [user for user in node.users if user.target is not operator.getitem or user.args[1] not in (0, 1)]
        if node.target in _PLAIN and (node.target is not ours.rms_norm.default or not read):
            node.target = _PLAIN[node.target]


# ------------------------------------------------------------------ finding


@dataclass(slots=True)
class _Run:
    """Nodes of one region in order, and the first node outside that reads one of them, directly or not."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    tainted: set[fx.Node] = field(default_factory=set)
    first: int = 0

    def takes(self, node: fx.Node, order: dict[fx.Node, int]) -> bool:
        """Whether the node may join: what it reads from outside is there before anything outside reads the region."""
        outside = [source for source in _read(node) if source not in self.nodes]
        if any(source in self.tainted for source in outside):
            return False
        return not self.tainted or all(order[source] < self.first for source in outside)


def _found(module: fx.GraphModule, order: dict[fx.Node, int]) -> Iterator[list[fx.Node]]:
    """The nodes of each region."""
    run = _Run()
    for node in module.graph.nodes:
        if _row_wise(module, node, run):
            if not run.takes(node, order):
                yield from _worth(run)
                run = _Run()
            if _row_wise(module, node, run):  # what it follows is still there
                run.nodes[node] = None
                continue
        if any(source in run.nodes or source in run.tainted for source in node.all_input_nodes):
            if not run.tainted:
                run.first = order[node]
            run.tainted.add(node)
    yield from _worth(run)


def _worth(run: _Run) -> Iterator[list[fx.Node]]:
    if sum(node.target in _STEPS for node in run.nodes) >= _LEAST:
        yield list(run.nodes)


def _read(node: fx.Node) -> list[fx.Node]:
    """The values that it reads, no constants."""
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def _row_wise(module: fx.GraphModule, node: fx.Node, run: _Run) -> bool:
    """Whether a node takes each token by itself, and a program has it. Heads told apart, and results of a norm, follow what is inside."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0] in run.nodes
    if node.target in (aten.view.default, aten.reshape.default):
        shape = shape_of(node)
        return node.args[0] in run.nodes and len(shape) == 4 and all(user.target is aten.transpose.int for user in node.users)
    if node.target is aten.transpose.int:
        return node.args[0] in run.nodes and set(node.args[1:]) == {1, 2}
    return node.target in _STEPS and _fits(module, node)


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether its tensors are rows (B, S, width) in fp32, and its weights constants."""
    sources = _read(node)
    if any(not isinstance(source.meta.get("val"), Tensor) or dtype_of(source) != torch.float32 for source in sources):
        return False
    if node.target in (aten.add.Tensor, aten.mul.Tensor):
        alike = all(shape_of(source) == shape_of(node) for source in sources) and len(shape_of(node)) == 3
        return alike and len(node.args) == 2 and not node.kwargs and all(isinstance(each, fx.Node) for each in node.args)
    if node.target is ours.rotary.default:
        return argument(node, "backwards") is False and sources[0].target is aten.transpose.int
    weights = [constant(module, source) for source in node.all_input_nodes if source.op == "get_attr"]
    return all(weight.is_contiguous() for weight in weights) and all(len(shape_of(source)) == 3 for source in sources)


def constant(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """The tensor that a get_attr node reads."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value


# ------------------------------------------------------------------ replacing


def _replace(module: fx.GraphModule, nodes: list[fx.Node], order: dict[fx.Node, int]) -> None:
    """One call in the place of these nodes, before the first node that reads what they make."""
    inside = set(nodes)
    read = list(dict.fromkeys(source for node in nodes for source in _read(node) if source not in inside))
    turns = {source for node in nodes if node.target is ours.rotary.default for source in node.args[1:3]}
    inputs = sorted((source for source in read if isinstance(source.meta.get("val"), Tensor)), key=turns.__contains__)  # rows first
    sizes = [source for source in read if source not in inputs]
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    builder = _Builder(module, inputs)
    if not results or not inputs or not all(builder.put(node) for node in nodes) or not all(builder.tellable(node) for node in results):
        return
    region = builder.region(results, _apart(module, nodes, [*inputs, *sizes], results))
    before = min((user for node in results for user in node.users if user not in inside), key=order.__getitem__)
    with module.graph.inserting_before(before):
        call = module.graph.call_function(region, (*inputs, *sizes))
        order[call] = order[before]
        for at, node in enumerate(results):
            made = module.graph.call_function(operator.getitem, (call, at))
            made.meta, order[made] = dict(node.meta), order[before]
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _apart(module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    """The same nodes as a module: inputs in, results out."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in inputs:
        values[source] = graph.placeholder(source.name)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in values:
                values[source] = graph.node_copy(source)  # a constant
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in results))
    _direct(graph)
    return fx.GraphModule(module, graph)


class _Builder:
    """Steps of a program, of nodes given in order."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
        self._module, self._inputs = module, inputs
        self._slots = {node: at for at, node in enumerate(inputs)}
        self._heads: dict[fx.Node, Heads] = {}
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
        if node.target not in _STEPS:  # heads apart, and in front of the tokens
            self._slots[node] = self._slots[source]
            self._heads[node] = self._heads[source] if source in self._heads else shape_of(node)[2:]  # type: ignore[assignment]
            return True
        step = _STEPS[node.target](self, node)
        if step is not None:
            self._steps.append(step)
        return step is not None

    def tellable(self, node: fx.Node) -> bool:
        """Whether a result can be handed out: dense rows, or heads in front of the tokens."""
        return node in self._slots and (node not in self._heads or node.target in (aten.transpose.int, ours.rotary.default))

    def region(self, results: Sequence[fx.Node], one_by_one: fx.GraphModule) -> Region:
        """All of it."""
        slots = list(dict.fromkeys(self._slots[node] for node in results))
        told = [(slots.index(self._slots[node]), self._heads.get(node)) for node in results]
        program = RowProgram(self._steps, len(self._inputs), self._widths, slots)
        return Region(program, told, one_by_one, len(self._inputs))

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
        if any(isinstance(given[name], fx.Node) and given[name].op != "get_attr" for name in names):  # type: ignore[attr-defined]
            return None
        held = {name: constant(self._module, each) if isinstance(each := given[name], fx.Node) else None for name in names}
        k, n = shape_of(given["x"])[-1], shape_of(node)[-1]  # type: ignore[arg-type]
        kind = row_program.GROUPS if node.target is group_linear.default else row_program.BYTES
        constants = (held["weight"], held.get("scales"), held["bias"])
        return RowStep(kind=kind, a=self.slot(given["x"]), out=self.new(node, n), n=n, k=k, constants=constants, after=str(given["after"]))

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
            kind=row_program.NORM, a=self.slot(x), b=self.slot(rest[0] if rest else None), out=out, more=more, n=n, constants=held, eps=eps
        )

    def pair(self, node: fx.Node) -> RowStep:
        """Of two values of one shape."""
        kind = {ours.swiglu.default: row_program.GATE, aten.add.Tensor: row_program.ADD, aten.mul.Tensor: row_program.MULTIPLY}[node.target]  # type: ignore[index]
        n = shape_of(node)[-1]
        return RowStep(kind=kind, a=self.slot(node.args[0]), b=self.slot(node.args[1]), out=self.new(node, n), n=n)

    def turn(self, node: fx.Node) -> RowStep | None:
        """Of heads that were told apart inside."""
        x, cos, sin = node.args[:3]
        if x not in self._heads or cos not in self._inputs or sin not in self._inputs:
            return None
        heads, width = self._heads[x]  # type: ignore[index]
        made = self.new(node, heads * width)
        self._heads[node] = (heads, width)
        return RowStep(kind=row_program.TURN, a=self.slot(x), b=self.slot(cos), more=self.slot(sin), out=made, n=heads, k=width // 2)


_STEPS: dict[object, Callable[[_Builder, fx.Node], RowStep | None]] = {
    group_linear.default: _Builder.linear,
    int8_linear.default: _Builder.linear,
    ours.rms_norm.default: _Builder.norm,
    ours.rms_norm_alone.default: _Builder.norm,
    ours.swiglu.default: _Builder.pair,
    ours.rotary.default: _Builder.turn,
    aten.add.Tensor: _Builder.pair,
    aten.mul.Tensor: _Builder.pair,
}
