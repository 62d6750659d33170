"""What a captured graph has that costs time and computes nothing."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from effcompile.core.torch_compat_aot import writes
from effcompile.ir.owned import copies_that_own

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)


def tidy(module: fx.GraphModule) -> None:
    """Remove what costs time and does nothing: metadata asserts, and in a graph without in-place operators
    copies, unless they lie in memory as their reader needs it.
    """
    functional = not any(writes(node) for node in module.graph.nodes)
    kept = copies_that_own(module.graph, lambda node: node.target is aten.clone.default)
    without_asserts(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.clone.default) if functional else ():
        if node not in kept and (not node.kwargs or _any_layout(node)):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def without_asserts(graph: fx.Graph) -> None:
    """Without asserts of metadata, which torch.export puts before each change of dtype."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def without_flattening(graph: fx.Graph, targets: Collection[object]) -> None:
    """Rows (B·S, K) that one of these linears reads, and then (B, S, N) again, as (B, S, K): what a
    transposed weight's product takes (GPT-2) keeps it apart from the residual sum and the attention.
    """
    for node in list(graph.nodes):
        flat = node.args[0] if node.target in targets and node.args else None
        if not isinstance(flat, fx.Node) or flat.target not in _VIEWS:
            continue
        rows, readers = flat.args[0], list(node.users)
        wanted = (*sizes(rows)[:-1], sizes(node)[-1])  # type: ignore[arg-type]
        same = sizes(rows)[-1] == sizes(flat)[-1] and len(sizes(flat)) == 2  # type: ignore[arg-type]
        if same and readers and all(each.target in _VIEWS and sizes(each) == wanted for each in readers):
            node.args = (rows, *node.args[1:])
            node.meta = {**node.meta, "val": readers[0].meta["val"]}
            for reader in readers:
                reader.replace_all_uses_with(node)
                graph.erase_node(reader)


def sizes(node: fx.Node) -> tuple[str, ...]:
    """As they are written: numbers, and names of what is free."""
    return tuple(map(str, node.meta["val"].shape))


def _any_layout(copy: fx.Node) -> bool:
    """Whether attentions alone read a copy: they take heads and masks as they lie, rows dense."""
    source = copy.args[0].meta["val"]  # type: ignore[union-attr]
    attended = [user.target is aten.scaled_dot_product_attention.default for user in copy.users]
    return bool(attended) and all(attended) and source.stride()[-1] == 1
