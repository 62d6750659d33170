"""Changing a captured training step: on a copy, with new nodes that carry values and module names like
captured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from effcompile.core import torch_compat_aot
from effcompile.core.errors import EffcompileError
from effcompile.core.reasons import ReasonError
from effcompile.core.types import Value
from effcompile.ir.step import Step

aten = torch.ops.aten

#: What a new node takes over from the node that it stands for.
_INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "stack_trace",
    "partitioner_tag",
    "autograd_backward",
)
#: Views that show the whole of their first argument, each element once: writing to one is writing to the
#: other.
_WHOLE_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.alias.default, aten.detach.default,
)  # fmt: skip


# it ends a match, it is no fault: no stage is to take it for one
class Refusal(ReasonError, EffcompileError):  # noqa: N818
    """Why a step cannot have a form."""


def copied(step: Step) -> tuple[Step, dict[fx.Node, fx.Node]]:
    """The step with a graph of its own, and node → its copy.

    Values in `meta` are shared, the graph is not.
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    result: Any = graph.graph_copy(step.graph, nodes)
    old = step.graph.output_node()
    nodes[old] = graph.output(result)
    nodes[old].meta = dict(old.meta)
    module = torch_compat_aot.graph_module(step.module, graph, step.module.__class__.__name__)
    module.meta = dict(step.module.meta)
    return replace(step, module=module, roles=step.roles.moved(nodes)), nodes


def call(
    graph: fx.Graph, origin: fx.Node, target: Callable[..., object], *args: Value, **kwargs: Value
) -> fx.Node:
    """A new node at the graph's insertion point, with its value (computed on the fake values of its
    arguments).

    origin: the node whose module, stack trace and place in autograd's order it takes over.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: origin.meta[key] for key in _INHERITED if key in origin.meta}
    given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*given[0], **given[1])
    return node


def is_whole_view(node: fx.Node) -> bool:
    """True for a view that shows all of its first argument, each element once."""
    return node.op == "call_function" and node.target in _WHOLE_VIEWS


def viewed(node: fx.Node) -> fx.Node:
    """The node that this one is a view of, through any number of whole views; itself when it is none."""
    while is_whole_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def operator_name(node: fx.Node) -> str:
    """The operator's name for messages: `aten.mul`, `output`."""
    if node.op != "call_function":
        return node.op
    name = getattr(node.target, "name", None)
    return name().replace("::", ".") if callable(name) else getattr(node.target, "__name__", str(node.target))
