"""Random numbers for units that are divided among ranks: each draws those of all of them, and has its own.

So tensor-parallel ranks whose generators stand alike drop what one process drops: of what all of them have
they draw the same anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.torch_compat_aot import with_dropout_mask
from effcompile.ops.mask_part import MASK_PART

__all__ = ["attention_of_part", "draw_in_parts", "dropout_of_part"]

aten = torch.ops.aten
#: (Its number, how many there are.)
Part = tuple[int, int]
#: Of queries (B, H, T, D).
_HEADS = 1


def draw_in_parts(graph: fx.Graph, drawn: Mapping[fx.Node, tuple[int, ...]], part: Part) -> None:
    """Let dropout draw for all of what a rank has a part of.

    Args:
        graph: of an exported forward that was cut to the rank's units, changed in place.
        drawn: its nodes that draw → their shapes before it was cut.
        part: the rank's.
    """
    for node, whole in drawn.items():
        here = tuple(node.meta["val"].shape)
        along = [axis for axis, (a, b) in enumerate(zip(whole, here, strict=True)) if a != b]
        if not along:
            continue  # all ranks have it, and draw the same
        if node.target is aten.dropout.default:
            (axis,) = along
            made = _replaced(graph, node, dropout_of_part, (*node.args[:2], axis, part), {})
        else:  # structures are found through nothing else that draws
            assert node.target is aten.scaled_dot_product_attention.default and along == [_HEADS], node
            given = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
            made = _replaced(graph, node, attention_of_part, (), {**given, **node.kwargs, "part": part})
        made.meta = dict(node.meta)


def _replaced(graph: fx.Graph, node: fx.Node, by: object, args: object, kwargs: object) -> fx.Node:
    with graph.inserting_before(node):
        made = graph.call_function(by, args, kwargs)  # type: ignore[arg-type]
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def dropout_of_part(x: Tensor, p: float, axis: int, part: Part) -> Tensor:
    """Dropout of a run along an axis, with the numbers of the whole's."""
    return x * MASK_PART(x.detach(), p, axis, *part) * (1 / (1 - p))


def attention_of_part(
    q: Tensor, k: Tensor, v: Tensor, *, part: Part, dropout_p: float, attn_mask: Tensor | None = None,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of a run of heads, its dropout with the numbers of all of them.

    q (B, H, T, D), k and v (B, H or fewer, S, D); as torch's own for dropout, which keeps the scores, and
    adds the mask: of a bool one it says what is seen. `options`: scale, enable_gqa.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    scores = q.detach()[..., :1].expand(*q.shape[:-1], k.shape[-2])  # their shape alone is read
    kept = MASK_PART(scores, dropout_p, _HEADS, *part)
    return with_dropout_mask(q, k, v, attn_mask, dropout_p, is_causal, kept, **options)
