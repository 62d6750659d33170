"""A group of element-wise nodes replaced by one call of a `Fused`: its own graph, its inputs, and what leaves
it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from effcompile.ir.program import module_path
from effcompile.ops.fused import Fused, TileLayout
from effcompile.passes.training.pointwise_graph import block_of, is_inner_view, link

_INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "stack_trace",
    "partitioner_tag",
    "autograd_backward",
)


def replace_group(graph: fx.Graph, members: Sequence[fx.Node], again: Collection[fx.Node]) -> fx.Node:
    """Put one node in the place of `members` (in graph order; they are left without readers).

    It stands before the last of them.

    again: forward nodes that are copied into the kernel where a member reads them.
    """
    inner = _Inner(frozenset(members), again)
    leaving = [node for node in members if _leaves(node, inner.members)]
    fused = inner.build(members, leaving)
    last = members[-1]
    with graph.inserting_before(last):
        call = graph.call_function(fused, tuple(inner.given))
        named = next((node for node in reversed(members) if module_path(node)), last)
        call.meta = {key: named.meta[key] for key in _INHERITED if key in named.meta}
        if "seq_nr" in last.meta:
            call.meta["seq_nr"] = last.meta["seq_nr"]
        values = [node.meta["val"] for node in leaving]
        call.meta["val"] = values[0] if len(values) == 1 else tuple(values)
        results = [call]
        if len(leaving) > 1:
            results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(leaving))]
            for result, node in zip(results, leaving, strict=True):
                result.meta = {**call.meta, "val": node.meta["val"]}
    for node, result in zip(leaving, results, strict=True):
        node.replace_all_uses_with(result)
    return call


def size_of(members: Sequence[fx.Node], again: Collection[fx.Node]) -> int:
    """How many operators a group's kernel would have."""
    inner = _Inner(frozenset(members), again)
    inner.find_inputs(members)
    return inner.operators


def _leaves(node: fx.Node, members: Collection[fx.Node]) -> bool:
    """Whether somebody outside the group reads a node, or a view of it."""
    return any(_leaves(user, members) if is_inner_view(user) else user not in members for user in node.users)


class _Inner:
    """Writes a kernel's graph: operands that are made inside, and the views between them, come along; others
    are inputs.
    """

    def __init__(self, members: Collection[fx.Node], again: Collection[fx.Node]) -> None:
        self.members, self.again = members, again
        self.blocks = {block_of(node) for node in members} - {""} or {""}
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.given: dict[fx.Node, None] = {}
        self.operators = 0

    def build(self, members: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> Fused:
        self.find_inputs(members)
        for node in self.given:
            self.made[node] = self.graph.placeholder(f"given{len(self.made)}")
        for node in members:
            self._value(node)
        self.graph.output(tuple(self.made[node] for node in leaving))
        layouts = [TileLayout.of(node.meta["val"]) for node in self.given]
        return Fused(self.graph, layouts, [TileLayout.of(node.meta["val"]) for node in leaving])

    def _inside(self, node: fx.Node) -> bool:
        """Whether a node is made within the kernel: an operator of it, or a view of one."""
        source = link(node)
        return source in self.members or (source in self.again and block_of(source) in self.blocks)

    def find_inputs(self, members: Sequence[fx.Node]) -> None:
        """Collect what the kernel is given, in the order of first use, and count its operators."""
        waiting, seen = list(reversed(members)), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if self._inside(node):
                waiting += reversed(node.all_input_nodes)
                self.operators += not is_inner_view(node)
            else:
                self.given[node] = None

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
            target: Any = node.target
            self.made[node] = self.graph.call_function(target, args, kwargs)
        return self.made[node]
