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
