"""Runs of operators over rows of tokens as programs (ops/row_program.py) for calls of few tokens.

A region is a run of operators that take each token by itself, norms, gates, rotations, linears, sums, and of
attentions over a cache, one that grows or an encoder's: of most models, all of a decoder's layers.
One call runs it where there are few tokens; its operators run one by one where there are many, or another
dtype or layout comes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, fx

from effcompile.backends.torch.joined import NodeRun, joined, put_call, values_read
from effcompile.backends.torch.plain import PLAIN, on_cpu, replace_by_plain
from effcompile.backends.torch.region_steps import SHAPES, STEPS, Builder, Told, constant
from effcompile.ir.program import dtype_of, shape_of
from effcompile.ops import few_rows, row_program
from effcompile.ops.append import append, lengthened
from effcompile.ops.cached_attention import FORMS, cached_attention, masks_so
from effcompile.ops.row_program import RowProgram
from effcompile.sites.parts import argument

aten = torch.ops.aten
ours = torch.ops.effcompile

#: Tokens up to which a region is one call.
FEW = 8
#: Fewer operators than this are left alone.
_LEAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """The caches of a region.

    `rooms`: rows that a new buffer has room for, of each that grows, the first ones; `read`: (mask, keys,
    values) of each attention.
    """

    rooms: tuple[int, ...] = ()
    read: tuple[tuple[int, int, int], ...] = ()

    def fits(self, caches: Sequence[Tensor], masks: Sequence[Tensor], batch: int, new: int) -> bool:
        """Whether a program takes them."""
        held = all(
            each.shape[0] == batch and each.dtype in FORMS and each.stride(3) == 1 for each in caches
        ) and all(each.shape[2] for each in caches[len(self.rooms) :])
        return held and all(
            caches[keys].shape == caches[values].shape
            and caches[keys].dtype is caches[values].dtype
            and (mask < 0 or masks_so(masks[mask], new, self._rows(caches, keys, new)))
            for mask, keys, values in self.read
        )

    def _rows(self, caches: Sequence[Tensor], at: int, new: int) -> int:
        """Of a cache after the call."""
        return caches[at].shape[2] + (new if at < len(self.rooms) else 0)


class Region:
    """A region at work: values, masks and caches in, and sizes that views name; values out, in the order of
    its nodes.
    """

    def __init__(
        self,
        program: RowProgram,
        told: Sequence[Told],
        one_by_one: fx.GraphModule,
        inputs: tuple[int, int, int, int],
        shelf: Shelf,
    ) -> None:
        """`told`: what each value is; `inputs`: how many are rows, the first ones, cos and sin behind them,
        masks, and caches.
        """
        self._program, self._told, self._one_by_one, self._shelf = program, tuple(told), one_by_one, shelf
        self._plain, self._rows, self._masked, self._cached = accumulate(inputs)
        self.__name__ = "region"

    def __deepcopy__(self, memo: object) -> Region:
        """Itself: nothing in it changes."""
        return self

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        first, values, masks = inputs[0].shape, inputs[: self._rows], inputs[self._rows : self._masked]
        caches = inputs[self._masked : self._cached]
        few = len(first) == 3 and 0 < first[0] * first[1] <= FEW
        if (
            not few
            or not all(_dense(each, first) for each in values)
            or not self._shelf.fits(caches, masks, *first[:2])
        ):
            found: Sequence[Tensor] = self._one_by_one(*inputs)
            return found
        # of a batch some may be the same for all its rows: learned positions
        whole = [
            each if each.shape[0] == first[0] else each.expand(first[0], -1, -1).contiguous()
            for each in values[: self._plain]
        ]
        grown = len(self._shelf.rooms)
        longer = [
            lengthened(cache, first[1], most)
            for cache, most in zip(caches[:grown], self._shelf.rooms, strict=True)
        ] + list(caches[grown:])
        made = self._program(*whole, *values[self._plain :], caches=longer, masks=masks)
        return [
            longer[at]
            if cached
            else made[at]
            if heads is None
            else made[at].view(first[0], first[1], *heads).transpose(1, 2)
            for at, heads, cached in self._told
        ]


def _dense(value: Tensor, leading: torch.Size) -> bool:
    """Whether a program takes it: fp32, dense, a row for each token (or, of cos and sin, for each token of
    one row).
    """
    fits = value.dim() == 3 and value.shape[1] == leading[1] and value.shape[0] in (1, leading[0])
    return fits and value.dtype is torch.float32 and value.is_contiguous() and not value.is_cuda


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """The module with its regions as calls of their own, and our other operators without torch's dispatcher.

    As it is where it has none of our operators and no cache, on a GPU, and where nothing can be compiled.
    """
    if (
        not on_cpu(module.graph)
        or not any(node.target in PLAIN or node.target is append for node in module.graph.nodes)
        or not row_program.available()
    ):
        return module
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    for found in list(_found(module, order, order)):
        if not _replace(module, found, order):
            for part in list(
                _found(module, order, [node for node in found if node.target is not cached_attention])
            ):
                _replace(module, part, order)
    module.graph.eliminate_dead_code()
    replace_by_plain(module.graph)
    module.graph.lint()
    module.recompile()
    return module


# ------------------------------------------------------------------ finding


def _found(
    module: fx.GraphModule, order: dict[fx.Node, int], among: Collection[fx.Node]
) -> Iterator[list[fx.Node]]:
    """The nodes of each region, of those that are `among` what may be in one."""
    joins = lambda node, run: node in among and _row_wise(module, node, run)  # noqa: E731
    for nodes in joined(module.graph, order, joins):
        if sum(node.target in STEPS for node in nodes) >= _LEAST:
            yield nodes


def _row_wise(module: fx.GraphModule, node: fx.Node, run: NodeRun) -> bool:
    """Whether a node takes each token by itself, and a program has it.

    Heads told apart, and results of a norm, follow what is inside.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0] in run.nodes
    if node.target in (aten.view.default, aten.reshape.default) and len(shape_of(node)) == 4:
        return node.args[0] in run.nodes and all(user.target is aten.transpose.int for user in node.users)
    if node.target in SHAPES:
        return node.args[0] in run.nodes and (
            node.target is not aten.transpose.int or set(node.args[1:]) == {1, 2}
        )
    if node.target is append:
        return (
            node.args[1] in run.nodes
            and isinstance(node.args[0], fx.Node)
            and node.args[0].op == "placeholder"
        )
    if node.target is cached_attention:
        return (
            node.args[0] in run.nodes
            and all(
                each in run.nodes if each.target is append else each.op == "placeholder"  # type: ignore[union-attr]
                for each in node.args[1:3]
            )
        )
    if node.target is aten.mul.Tensor and not isinstance(node.args[1], fx.Node):
        return node.args[0] in run.nodes and _fits(module, node)  # else it may be of cos and sin
    return node.target in STEPS and _fits(module, node)


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether its tensors are rows (B, S, width) in fp32, and its weights constants."""
    sources = values_read(node)
    if any(
        not isinstance(source.meta.get("val"), Tensor) or dtype_of(source) != torch.float32
        for source in sources
    ):
        return False
    if node.target in (aten.add.Tensor, aten.mul.Tensor):
        alike = all(shape_of(source) == shape_of(node) for source in sources) and len(shape_of(node)) == 3
        return alike and bool(sources) and len(node.args) == 2 and not node.kwargs and _added(module, node)
    if node.target is ours.rotary.default:
        return argument(node, "backwards") is False and sources[0].target is aten.transpose.int
    weights = [constant(module, source) for source in node.all_input_nodes if source.op == "get_attr"]
    return all(weight.is_contiguous() for weight in weights) and all(
        len(shape_of(source)) == 3 for source in sources
    )


def _added(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a sum or a product is one of two values, a value times a number, or a value and one row."""
    first, second = node.args
    if not isinstance(first, fx.Node) or first.op == "get_attr":
        return False
    if not isinstance(second, fx.Node):
        return node.target is aten.mul.Tensor and isinstance(second, int | float)
    if second.op != "get_attr":
        return True
    row = constant(module, second)
    return node.target is aten.add.Tensor and few_rows.takes(row) and row.numel() == shape_of(node)[-1]


# ------------------------------------------------------------------ replacing


def _replace(module: fx.GraphModule, nodes: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """One call in the place of these nodes, before the first node that reads what they make; False where no
    program has them.
    """
    inside = set(nodes)
    read = list(
        dict.fromkeys(source for node in nodes for source in values_read(node) if source not in inside)
    )
    appends = [node for node in nodes if node.target is append]
    caches = [node.args[0] for node in appends if isinstance(node.args[0], fx.Node)]
    attended = (each for node in nodes if node.target is cached_attention for each in node.args[1:3])
    kept = list(dict.fromkeys(each for each in attended if isinstance(each, fx.Node) and each not in inside))
    rooms = tuple(room for node in appends if isinstance(room := node.args[2], int))
    masks = list(
        dict.fromkeys(
            node.args[3]
            for node in nodes
            if node.target is cached_attention and isinstance(node.args[3], fx.Node)
        )
    )
    turns = {source for node in nodes if node.target is ours.rotary.default for source in node.args[1:3]}
    tensors = (
        source
        for source in read
        if isinstance(source.meta.get("val"), Tensor) and source not in (*masks, *caches, *kept)
    )
    rows = sorted(tensors, key=turns.__contains__)  # rows first
    sizes = [source for source in read if source not in (*rows, *masks, *caches, *kept)]
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    sources = {node: at for at, node in enumerate(kept, len(caches))}
    builder = Builder(module, rows, masks, sources)
    if (
        not results
        or not rows
        or not all(builder.put(node) for node in nodes)
        or not all(builder.tellable(node) for node in results)
    ):
        return False
    inputs = [*rows, *masks, *caches, *kept, *sizes]
    turning = sum(map(turns.__contains__, rows))
    counts = (len(rows) - turning, turning, len(masks), len(caches) + len(kept))
    shelf = Shelf(rooms=rooms, read=tuple(builder.attentions))
    region = Region(*builder.built(results), _apart(module, nodes, inputs, results), counts, shelf)
    put_call(module.graph, nodes, region, inputs, results, order)
    return True


def _apart(
    module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
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
    replace_by_plain(graph)
    return fx.GraphModule(module, graph)
