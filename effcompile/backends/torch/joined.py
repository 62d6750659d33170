"""Nodes of a graph that become one call: which may stand together, and the call in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

__all__ = ["NodeRun", "joined", "put_call", "values_read"]


def values_read(node: fx.Node) -> list[fx.Node]:
    """The values that it reads, no constants."""
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


@dataclass(slots=True)
class NodeRun:
    """Nodes in order, and the first node outside that reads one of them, directly or not."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    tainted: set[fx.Node] = field(default_factory=set)
    first: int = 0

    def takes(self, node: fx.Node, order: dict[fx.Node, int]) -> bool:
        """Whether the node may join: what it reads from outside is there before anything outside reads the
        run.
        """
        outside = [source for source in values_read(node) if source not in self.nodes]
        if any(source in self.tainted for source in outside):
            return False
        return not self.tainted or all(order[source] < self.first for source in outside)


def joined(
    graph: fx.Graph, order: dict[fx.Node, int], joins: Callable[[fx.Node, NodeRun], bool]
) -> Iterator[list[fx.Node]]:
    """The nodes of each run, as long as they get; `joins`: whether a node may be in this one."""
    run = NodeRun()
    for node in graph.nodes:
        if joins(node, run):
            if not run.takes(node, order):
                yield list(run.nodes)
                run = NodeRun()
            if joins(node, run):  # what it follows is still there
                run.nodes[node] = None
                continue
        if any(source in run.nodes or source in run.tainted for source in node.all_input_nodes):
            if not run.tainted:
                run.first = order[node]
            run.tainted.add(node)
    yield list(run.nodes)


def put_call(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    call: Callable[..., object],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    order: dict[fx.Node, int],
) -> fx.Node:
    """One call of these inputs in the place of these nodes, before the first node that reads one of its
    results.
    """
    inside = set(nodes)
    before = min(
        (user for node in results for user in node.users if user not in inside), key=order.__getitem__
    )
    with graph.inserting_before(before):
        made_by = graph.call_function(call, tuple(inputs))
        order[made_by] = order[before]
        for at, node in enumerate(results):
            made = graph.call_function(operator.getitem, (made_by, at))
            made.meta, order[made] = dict(node.meta), order[before]
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
    return made_by
