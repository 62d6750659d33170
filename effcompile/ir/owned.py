"""What a caller receives of a graph, and the copies that keep two results from being one memory."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable

from torch import fx

from effcompile.core.torch_compat_operators import is_view


def received(graph: fx.Graph) -> set[fx.Node]:
    """What a call returns, and what that may be views of."""
    found: set[fx.Node] = set()
    left = list(graph.output_node().all_input_nodes)
    while left:
        node = left.pop()
        if node not in found and _is_view(node):
            left += node.all_input_nodes
        found.add(node)
    return found


def copies_that_own(graph: fx.Graph, is_copy: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Of the nodes that copy another's memory those without which two results would share it: a caller that
    writes to one would find it in the other.
    """
    owners = defaultdict[fx.Node, set[fx.Node]](set)
    for result in graph.output_node().all_input_nodes:
        node, first = result, None
        while (copied := is_copy(node)) or _is_view(node):
            first = node if copied and first is None else first
            node = node.all_input_nodes[0]
        owners[node].add(node if first is None else first)
    shared = [each for each in owners.values() if len(each) > 1]
    return {node for each in shared for node in each if is_copy(node)}


def _is_view(node: fx.Node) -> bool:
    return bool(node.all_input_nodes) and (is_view(node.target) or node.target is operator.getitem)
