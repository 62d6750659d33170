"""From a program to something to run: flat tensors in and out, constants folded, weights packed for oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.errors import LoweringError
from effcompile.ir.export import lenient_views
from effcompile.ir.program import Program


def flatten(program: Program) -> fx.GraphModule:
    """The program's graph as a function of its tensor leaves, which returns its tensor leaves as a tuple.

    Raises:
        LoweringError: the graph's placeholders are not the leaves of the example's arguments.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, values)
    graph.output(tuple(values[node] for node in program.tensor_results()))
    lenient_views(graph)
    for old, new in values.items():
        new.meta = dict(old.meta)
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves((program.args, dict(program.kwargs)))
    if len(holders) != len(leaves):
        raise LoweringError(f"{program.name}: the graph takes {len(holders)} inputs and the example has {len(leaves)}. Capture again.")
    for holder, leaf in zip(holders, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            _replace_by_value(graph, holder, leaf)
    return fx.GraphModule(program.module, graph, class_name=program.name)


def _replace_by_value(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda a: value if a is node else a)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda a: value if a is node else a)
    graph.erase_node(node)


def pack(module: fx.GraphModule) -> fx.GraphModule:
    """The module with its packing operators carried out: weights in oneDNN's blocked layout, plain copies dropped."""
    packers = torch_compat.packing_operators()
    for index, node in enumerate(list(module.graph.nodes)):
        if node.op != "call_function" or node.target not in packers:
            continue
        weight = node.args[0]
        assert isinstance(weight, fx.Node)
        value = _attribute(module, str(weight.target))
        with torch.no_grad():
            packed = node.target(value.detach(), *node.args[1:])
        name = f"_packed_{index}"
        module.register_buffer(name, packed)
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph, class_name=type(module).__name__)


def _attribute(module: fx.GraphModule, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, torch.Tensor)
    return value
