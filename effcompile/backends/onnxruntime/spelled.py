"""Operators that torch.onnx has no translation for, or one of fewer digits, in others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

aten = torch.ops.aten


def spell_out(graph: fx.Graph) -> None:
    """Edits an exported graph whose nodes have values."""
    _divide_as_integers(graph)
    _count_below(graph)


def _divide_as_integers(graph: fx.Graph) -> None:
    """Integers divided towards zero: torch.onnx divides them as floats, which have 24 bits."""
    modes = {aten.div.Tensor_mode: aten.fmod.Tensor, aten.div.Scalar_mode: aten.fmod.Scalar}
    for node in [node for target in modes for node in graph.find_nodes(op="call_function", target=target)]:
        value = node.meta["val"]
        if value.is_floating_point() or node.kwargs.get("rounding_mode") != "trunc":
            continue
        x, y = node.args
        with graph.inserting_before(node):
            rest = graph.call_function(
                modes[node.target] if isinstance(y, fx.Node) else aten.fmod.Scalar, (x, y)
            )
            whole = graph.call_function(aten.sub.Tensor, (x, rest))
        for made in (rest, whole):
            made.meta = {**node.meta, "val": value}
        node.target, node.args, node.kwargs = aten.floor_divide.default, (whole, y), {}


def _count_below(graph: fx.Graph) -> None:
    """`searchsorted` and `bucketize` as how many of the sorted numbers are below each value: those that are
    not as large, for a NaN is behind all.
    """
    targets = (aten.searchsorted.Tensor, aten.bucketize.Tensor)
    for node in [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]:
        ordered, values = node.args if node.target is aten.searchsorted.Tensor else node.args[::-1]
        if not isinstance(ordered, fx.Node) or not isinstance(values, fx.Node):
            continue
        right = node.kwargs.get("right") or node.kwargs.get("side") == "right"
        with graph.inserting_before(node):
            call = _with_values(graph, node)
            if isinstance(places := node.kwargs.get("sorter"), fx.Node):
                ordered = call(aten.gather.default, ordered, -1, places)
            if ordered.meta["val"].dim() > 1:
                ordered = call(aten.unsqueeze.default, ordered, -2)
            behind = aten.gt.Tensor if right else aten.ge.Tensor
            above = call(behind, ordered, call(aten.unsqueeze.default, values, -1))
            kind = node.meta["val"].dtype
            below = call(aten._to_copy.default, call(aten.logical_not.default, above), dtype=kind)
        # with its own name, which the outputs may go by
        node.target, node.args, node.kwargs = aten.sum.dim_IntList, (below, [-1]), {"dtype": kind}


def _with_values(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    """Makes calls whose values are known, as an exported graph's are."""

    def call(target: Callable[..., object], *args: fx.node.Argument, **kwargs: fx.node.Argument) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with like.meta["val"].fake_mode:
            node.meta = {**like.meta, "val": target(*given, **named)}
        return node

    return call
