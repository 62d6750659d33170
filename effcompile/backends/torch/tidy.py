"""What a captured graph has that costs time and computes nothing."""

from __future__ import annotations

import torch
from torch import fx

from effcompile.core.torch_compat_aot import writes
from effcompile.ir.owned import copies_that_own

aten = torch.ops.aten


def tidy(module: fx.GraphModule) -> None:
    """Remove what costs time and does nothing: metadata asserts, and in a graph without in-place operators
    copies, unless they lie in memory as their reader needs it.
    """
    functional = not any(writes(node) for node in module.graph.nodes)
    kept = copies_that_own(module.graph, lambda node: node.target is aten.clone.default)
    for node in list(module.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif not functional or node.target is not aten.clone.default or node in kept:
            continue
        elif not node.kwargs or _any_layout(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _any_layout(copy: fx.Node) -> bool:
    """Whether attentions alone read a copy: they take heads and masks as they lie, rows dense."""
    source = copy.args[0].meta["val"]  # type: ignore[union-attr]
    attended = [user.target is aten.scaled_dot_product_attention.default for user in copy.users]
    return bool(attended) and all(attended) and source.stride()[-1] == 1
