"""What element-wise fusion asks of a step's graph: which operators are element-wise, what is a view of what,
what may run as one.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import fx

from effcompile.core.torch_compat_aot import is_random, writes
from effcompile.ir.program import module_path
from effcompile.passes.training.step_edit import is_whole_view

aten = torch.ops.aten

#: Elements of the smallest tensor that is worth a kernel of its own.
SMALLEST = 16 << 10
#: Element-wise, though torch does not tag them so.
_ALSO_ELEMENTWISE = (aten._to_copy.default, aten.masked_fill.Tensor, aten.hardtanh_backward.default)
#: So cheap that doing them once per element of a larger, broadcast result costs nothing.
_CHEAP = (
    "add",
    "sub",
    "mul",
    "neg",
    "where",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bitwise_and",
    "bitwise_or",
    "bitwise_not",
    "_to_copy",
)


def is_view(node: fx.Node) -> bool:
    """True for an operator whose result looks at its first argument's memory, and for the parts
    of a split.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    looks = (
        schema is not None
        and not schema.is_mutable
        and any(result.alias_info is not None for result in schema.returns)
    )
    return looks or is_whole_view(node)


def base(node: fx.Node) -> fx.Node:
    """The node that made the memory which this one looks at."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_inner_view(node: fx.Node) -> bool:
    """True for a view that a kernel can look through: it reorders or repeats elements and leaves out none."""
    return is_whole_view(node) or (node.op == "call_function" and node.target is aten.expand.default)


def link(node: fx.Node) -> fx.Node:
    """The node whose elements this one shows, through views that a kernel can look through."""
    while is_inner_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_elementwise(node: fx.Node) -> bool:
    """True for an operator that makes one large new tensor of static shape, each element from the same
    elements of its operands.
    """
    target, value = node.target, node.meta.get("val")
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None or not isinstance(value, torch.Tensor):
        return False
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and target not in _ALSO_ELEMENTWISE:
        return False
    if schema.is_mutable or is_view(node) or is_random(target) or value.layout is not torch.strided:
        return False
    tensors = [arg.meta.get("val") for arg in node.all_input_nodes]
    static = all(type(size) is int for size in (*value.shape, *value.stride()))
    large = static and value.numel() >= SMALLEST
    return (
        large
        and bool(tensors)
        and all(isinstance(t, torch.Tensor) and (t.device == value.device or t.dim() == 0) for t in tensors)
    )


def is_sum(node: fx.Node) -> bool:
    """True for a + b, which gradients of one value are added up with."""
    return node.target is aten.add.Tensor and len(node.all_input_nodes) > 1


def is_cheap(node: fx.Node) -> bool:
    """True for an operator of a few cycles per element."""
    return str(node.target).split(".")[1] in _CHEAP


def elements(node: fx.Node) -> int:
    """Elements of a node's tensor."""
    return int(node.meta["val"].numel())


def block_of(node: fx.Node) -> str:
    """The repeated module that a node belongs to: "h.3" of "h.3.mlp.act"; "" without one."""
    parts = module_path(node).split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read a node's elements, by themselves or through views that a kernel can look through."""
    for user in node.users:
        if is_inner_view(user):
            yield from readers(user)
        else:
            yield user


def with_views(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes, each followed by all views of it that a kernel can look through."""
    found = list(nodes)
    for node in found:
        found += [user for user in node.users if is_inner_view(user)]
    return found


def written(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node that writes in place → the nodes that made the memory that it writes to."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if writes(node):
            schema = node.target._schema
            given = {
                argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)
            } | node.kwargs
            names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            found[node] = [base(given[name]) for name in names if isinstance(given.get(name), fx.Node)]
    return found


def lasting_order(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(before, after): pairs whose order an edit must keep though no value goes between them: writes in
    place, random draws.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    pairs: list[tuple[fx.Node, fx.Node]] = []
    memory = {node: base(node) for node in nodes} if (writing := written(graph)) else {}
    touched = defaultdict[fx.Node, list[fx.Node]](list)
    for node in nodes if writing else ():
        for made in {memory[arg] for arg in node.all_input_nodes}:
            touched[made].append(node)
    for write, targets in writing.items():
        touching = sorted({n for made in targets for n in touched[made]}, key=position.__getitem__)
        pairs += [
            (n, write) if position[n] < position[write] else (write, n) for n in touching if n is not write
        ]
    random = [node for node in nodes if is_random(node.target)]
    return pairs + list(pairwise(random))


class Reach:
    """Who comes before whom, nodes that run as one taken as one: bit i stands for the graph's i-th node."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(nodes)}
        before: list[list[int]] = [[self.position[arg] for arg in node.all_input_nodes] for node in nodes]
        for first, second in lasting_order(graph):
            before[self.position[second]].append(self.position[first])
        self.above = [0] * len(nodes)
        self.below = [1 << i for i in range(len(nodes))]
        for i, operands in enumerate(before):
            self.above[i] = 1 << i
            for k in operands:
                self.above[i] |= self.above[k]
        for i in reversed(range(len(nodes))):
            for k in before[i]:
                self.below[k] |= self.below[i]

    def join(self, nodes: Iterable[fx.Node]) -> bool:
        """Take nodes as one from now on.

        False, and nothing changes, when another node must run between them.
        """
        places = [self.position[node] for node in nodes]
        own = up = down = knew_up = knew_down = 0
        for i in places:
            own, up, down = own | 1 << i, up | self.above[i], down | self.below[i]
        if up & down & ~own:
            return False
        for i in places:  # who comes after the last node of a chain knows all before the chain already
            knew_up |= self.below[i] if self.above[i] == up else 0
            knew_down |= self.above[i] if self.below[i] == down else 0
        for i in _bits(down & ~knew_up):
            self.above[i] |= up
        for i in _bits(up & ~knew_down):
            self.below[i] |= down
        return True


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def sort(graph: fx.Graph, order: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Put the graph in topological order, each node as near as possible to where it stands.

    `order`: further (before, after).
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    after: dict[fx.Node, list[fx.Node]] = {node: list(node.users) for node in nodes}
    for first, second in order:
        if first in position and second in position:
            after[first].append(second)
    waits = dict.fromkeys(nodes, 0)
    for followers in after.values():
        for node in followers:
            waits[node] += 1
    ready = [position[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    done: list[fx.Node] = []
    while ready:
        done.append(nodes[heapq.heappop(ready)])
        for node in after[done[-1]]:
            waits[node] -= 1
            if not waits[node]:
                heapq.heappush(ready, position[node])
    assert len(done) == len(nodes), "nodes that run as one wait for each other"
    for first, second in pairwise(done):
        first.append(second)
