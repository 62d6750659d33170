"""Calls of operators as nodes of a graph, for what is asked of one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def call_of(target: Any, *args: object, results: object = None, **kwargs: object) -> fx.Node:
    """A node that calls an operator on these values, tensors as inputs of the graph.

    `results`: what it is known to return.
    """
    graph = fx.Graph()

    def entered(value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        held = graph.placeholder("x")
        held.meta["val"] = value
        return held

    node = graph.call_function(target, fx.node.map_aggregate(args, entered), kwargs)  # type: ignore[arg-type]
    if results is not None:
        node.meta["val"] = results
    return node
