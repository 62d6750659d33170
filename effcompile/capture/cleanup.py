"""What torch.export leaves behind and no pass wants to see: asserts, copies of nothing, missing or suffixed
module names.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.errors import CaptureError
from effcompile.core.torch_compat_export import known_equal
from effcompile.core.torch_compat_operators import is_pointwise, is_view
from effcompile.ir.owned import copies_that_own, received

aten = torch.ops.aten

#: Checks of what tracing assumed. `effcompile.ir.export.Domain` keeps the assumptions, so that nothing is
#: lost.
_ASSERTS = tuple(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("_assert_tensor_metadata", "default"),
        ("_assert_scalar", "default"),
        ("sym_constrain_range", "default"),
        ("sym_constrain_range_for_size", "default"),
    )
    if hasattr(aten, name)
)
#: What else gives the same at every call and makes masks and positions.
_MADE = tuple(
    getattr(getattr(aten, name), overload)
    for name, overloads in {
        "arange": ("default", "start", "start_step"),
        "where": ("Scalar", "ScalarOther", "ScalarSelf"),
        **dict.fromkeys(("full", "zeros", "ones", "full_like", "new_ones", "new_zeros"), ("default",)),
        **dict.fromkeys(("triu", "tril", "cumsum", "clone", "_to_copy"), ("default",)),
        "index": ("Tensor",),
        "sym_size": ("int",),
    }.items()
    for overload in overloads
)
_COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.detach.default)


def drop_asserts(graph: fx.Graph) -> None:
    """Remove the asserts and what only they read."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTS:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def refuse_layouts(graph: fx.Graph) -> None:
    """Refuse a graph with tensors that have no storage of their own to count.

    Raises:
        CaptureError: one is sparse, or in oneDNN's layout.
    """
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                raise CaptureError(
                    f"{node.target} is a tensor of layout {leaf.layout}, and a plan holds dense ones. Keep "
                    "it dense (.to_dense()), or its indices and values in buffers of their own."
                )


def drop_copies(graph: fx.Graph) -> None:
    """Remove clones that dropout left and slices of everything: the graph is functional, and strides stay the
    same. Not those that keep two results apart.
    """
    kept = copies_that_own(graph, _is_copy)
    for node in list(graph.nodes):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if (
            isinstance(source, fx.Node)
            and ((_is_copy(node) and node not in kept) or _is_whole_slice(node))
            and _same_layout(node, source)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def compute_once(graph: fx.Graph) -> None:
    """One node for what element-wise operators, views and ranges compute twice of the same: a mask or
    positions that a model makes anew in every layer. Not what a caller receives, or a view of, which must be
    its own.
    """
    first: dict[object, fx.Node] = {}
    theirs = received(graph)
    for node in list(graph.nodes):
        if node in theirs or not _is_repeatable(node):
            continue
        other = first.setdefault(_computed(node), node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)


def share_tied_weights(module: fx.GraphModule) -> None:
    """One get_attr per tensor, so that every reader of a tied weight is among the users of one node."""
    first: dict[int, fx.Node] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        other = first.setdefault(id(value), node)
        if other is not node and isinstance(value, torch.Tensor):
            node.replace_all_uses_with(other)
            module.graph.erase_node(node)


def name_modules(graph: fx.Graph) -> None:
    """Give every call its module's qualified name, without the `@1` that torch adds at a module's second
    call.

    A node that torch left without one takes it from the node it reads, else from its first user.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack") or _borrowed(node)
            node.meta["nn_module_stack"] = {k: (re.sub(r"@\d+", "", v[0]), *v[1:]) for k, v in stack.items()}


def _borrowed(node: fx.Node) -> dict[str, Any]:
    for other in (*node.all_input_nodes, *node.users):
        if other.op == "call_function" and other.meta.get("nn_module_stack"):
            return dict(other.meta["nn_module_stack"])
    return {"L__self__": ("", torch.nn.Module)}


def _is_repeatable(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        is_pointwise(node.target) or is_view(node.target) or node.target in _MADE
    )


def _computed(node: fx.Node) -> object:
    """What it computes, so that equal ones are equal: 1 and 1.0 are not, nor are True and 1."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return (
        node.target,
        spec,
        tuple((type(leaf), repr(leaf) if isinstance(leaf, float) else leaf) for leaf in leaves),
    )


def _is_copy(node: fx.Node) -> bool:
    return node.target in _COPIES and len(node.args) == 1 and not node.kwargs


def _is_whole_slice(node: fx.Node) -> bool:
    if node.target is not aten.slice.Tensor or node.kwargs or len(node.args) > 4:
        return False
    start, end = (*node.args[2:], None, None)[:2]
    return bool(start in (0, None) and (end is None or end == sys.maxsize))


def _same_layout(node: fx.Node, source: fx.Node) -> bool:
    """Same strides, and not a copy that a caller receives: an output must not alias an input or a weight."""
    mine, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    returned = any(user.op == "output" for user in node.users)
    # known of sizes that only data tells, too
    alike = all(map(known_equal, mine.stride(), other.stride()))
    return mine.dim() == other.dim() and alike and not (returned and source.op in ("placeholder", "get_attr"))
