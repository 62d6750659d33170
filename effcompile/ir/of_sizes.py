"""What a call computes of the sizes of its inputs and of weights alone: the same for all calls of them.

Positions, their biases and rotations, causal masks.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.goal import Goal
from effcompile.core.torch_compat_aot import writes
from effcompile.core.torch_compat_operators import is_determined, is_view
from effcompile.ir.owned import received
from effcompile.ir.program import ancestors, shape_of

#: Part of the weights' bytes that such values may take beside them.
SHARE = 0.125
#: Operators from which on it is worth a call of its own to find their results.
_FEWEST = 2
_OF_NUMBERS = frozenset(
    getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "truediv", "getitem")
)


class OfSizes(NamedTuple):
    """`results`: the tensors that the rest of a graph reads. `nodes`: what computes them, in order. `sizes`:
    of inputs, that they follow from.
    """

    results: tuple[fx.Node, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    sizes: tuple[fx.Node, ...] = ()

    def nbytes(self) -> int:
        """Bytes of the results at the example's sizes."""
        return sum(math.prod(shape_of(each)) * each.meta["val"].itemsize for each in self.results)

    def operators(self) -> set[fx.Node]:
        """Those of `nodes` that compute tensors which nothing else reads."""
        found = set[fx.Node]()
        for node in reversed(self.nodes):
            if node in self.results or found.issuperset(node.users):
                found.add(node)
        return {node for node in found if isinstance(node.meta.get("val"), torch.Tensor)}


def may_be_kept(goal: Goal) -> bool:
    """Whether bytes beside the weights may be kept for time: not where bytes are what counts, nor of a
    generation, which computes them once a prompt.
    """
    return goal.mode == "inference" and goal.memory is None and goal.minimize == "time"


def of_sizes(graph: fx.Graph) -> OfSizes:
    """What a graph computes of sizes and weights alone, without what a caller receives, or may see; nothing
    where the graph writes into a tensor.
    """
    if any(writes(node) for node in graph.nodes):
        return OfSizes()
    numbers, tensors = _followed(graph)
    shown = received(graph)
    results = [
        node
        for node in graph.nodes
        if node in tensors
        and isinstance(node.meta["val"], torch.Tensor)
        and node not in shown
        and any(user not in tensors for user in node.users)
    ]
    nodes = ancestors(results)
    ordered = [node for node in graph.nodes if node in nodes and node.op != "placeholder"]
    computed = [n for n in ordered if n in tensors and not is_view(n.target)]
    if len(computed) < _FEWEST:
        return OfSizes()
    sizes = tuple(node for node in ordered if node in numbers and _is_size(node))
    return OfSizes(tuple(results), tuple(node for node in ordered if node not in sizes), sizes)


def _followed(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Numbers that follow from sizes of inputs, and tensors that follow from these, from numbers in the graph
    and from weights, but not from weights alone: what is computed of them is what a plan does not store.
    """
    numbers, weights, tensors = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            weights.add(node)
        elif _is_size(node):
            numbers.add(node)
        elif node.op != "call_function" or not _is_determined(node):
            continue
        elif inputs and weights.issuperset(inputs):
            weights.add(node)
        elif (numbers | weights | tensors).issuperset(inputs):
            (tensors if _has_tensors(node) else numbers).add(node)
    return numbers, tensors


def _is_size(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return (
        node.target is torch.ops.aten.sym_size.int
        and isinstance(source, fx.Node)
        and source.op == "placeholder"
    )


def _is_determined(node: fx.Node) -> bool:
    return node.target in _OF_NUMBERS or is_determined(node.target)


def _has_tensors(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))
