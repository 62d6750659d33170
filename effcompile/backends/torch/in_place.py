"""A step of generation whose cache grows where it stands: the graph's concatenations become appends (ops/append.py)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx

from effcompile.ops.append import append

aten = torch.ops.aten


def in_place(module: fx.GraphModule, capacities: Mapping[int, int]) -> fx.GraphModule:
    """The module with rows of its cache appended in place.

    Args:
        module: flat tensors in, flat tensors out; concatenates new rows to an input.
        capacities: place of such an input → rows that a new buffer of it has room for.
    """
    graph = copy.deepcopy(module.graph)
    holders = graph.find_nodes(op="placeholder")
    for at, capacity in capacities.items():
        for node in list(holders[at].users):
            if node.target is aten.cat.default and _appends(node, holders[at]):
                with graph.inserting_before(node):
                    longer = graph.call_function(append, (holders[at], node.args[0][1], capacity))
                longer.meta = dict(node.meta)
                node.replace_all_uses_with(longer)
                graph.erase_node(node)
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def _appends(node: fx.Node, holder: fx.Node) -> bool:
    """Whether it is `cat([holder, new], rows)`."""
    parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
    return isinstance(parts, (list, tuple)) and len(parts) == 2 and parts[0] is holder and axis in (2, -2)
