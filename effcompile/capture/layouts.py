"""Operators that check how their operand lies in memory get one that lies so at run time, too."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

#: operator → the operands whose layout it checks against one another.
_CHECKED = {aten.native_group_norm.default: (0,), aten.native_group_norm_backward.default: (0, 1)}


def lay_out_plainly(graph: fx.Graph) -> None:
    """A copy in the order of the axes of what GroupNorm reads in another order, where an axis has the size 1.

    Which memory format such a tensor has, torch asks the stride of that axis, too; a tracer's (of a view of a
    transposed tensor) is not always that at run time. Then the format that autograd chose while it was traced
    is not the one that the operator finds, and it raises. A model alone, whose batch is 1, makes the same
    copy before the norm.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        for at in _CHECKED.get(node.target, ()):
            operand = node.args[at]
            value = operand.meta["val"]
            if value.is_contiguous() or 1 not in value.shape:
                continue
            if operand not in copies:
                with graph.inserting_after(operand):
                    copies[operand] = graph.call_function(
                        aten.clone.default, (operand,), {"memory_format": torch.contiguous_format}
                    )
                copies[operand].meta = {
                    **operand.meta,
                    "val": torch.empty_like(value, memory_format=torch.contiguous_format),
                }
            node.update_arg(at, copies[operand])


def keep_strides(graph: fx.Graph) -> None:
    """A copy that lies as it did while it was traced of what `as_strided` takes apart by its place in memory
    (Longformer's overlapping windows): where a pass has laid it out otherwise, that would be something else.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        operand = node.args[0]
        value = operand.meta["val"]
        order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
        if not all(type(n) is int for n in (*value.shape, *value.stride())):
            continue
        if not value.permute(order).is_contiguous() or value.storage_offset():
            continue  # it has gaps: nothing that could be made again
        with graph.inserting_before(node):
            laid = graph.call_function(aten.permute.default, (operand, order))
            laid.meta["val"] = value.permute(order)
            copy = graph.call_function(
                aten.clone.default, (laid,), {"memory_format": torch.contiguous_format}
            )
            copy.meta["val"] = torch.empty_like(laid.meta["val"], memory_format=torch.contiguous_format)
            back = [order.index(axis) for axis in range(value.dim())]
            same = graph.call_function(aten.permute.default, (copy, back))
            same.meta["val"] = copy.meta["val"].permute(back)
        node.update_arg(0, same)
