"""Attentions of a graph as the plan has them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.ops.bf16_attention import bf16_attention
from effcompile.ops.fp32_attention import fp32_attention
from effcompile.ops.int8_attention import int8_attention
from effcompile.sites.parts import AttentionSite, argument, attentions

aten = torch.ops.aten

#: What makes one axis of two that lie side by side.
_MERGES = (aten._unsafe_view.default, aten.view.default, aten.reshape.default)
#: Forms that are an operator of ours in the place of sdpa, with its arguments.
_OWN = {
    "sdpa_bf16": bf16_attention.default,
    "sdpa_int8_token": int8_attention.default,
    **dict.fromkeys(("sdpa_fp32", "causal_fp32"), fp32_attention.default),
}
#: The site a node computes, in its meta. What it computes is read off its operator and tensors.
SITE = "effcompile_site"


def inlined(graph: fx.Graph, function: Callable[..., object], *args: object) -> object:
    """Trace `function` (of aten calls) into a graph at its insertion point; returns what it returns, as
    nodes.
    """
    traced = fx.symbolic_trace(function).graph
    holders = [node for node in traced.nodes if node.op == "placeholder"]
    return graph.graph_copy(traced, dict(zip(holders, args, strict=True)))  # type: ignore[arg-type]


def edit_attentions(program: Program) -> None:
    """`math`: matmul, softmax and matmul as separate kernels, by torch's own decomposition. A form of `_OWN`:
    that operator.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    added: dict[fx.Node, fx.Node] = {}
    for site in attentions(program):
        site.node.meta[SITE] = site.site
        _group(site.node)
        if (own := _OWN.get(program.word_at(site.site) or "")) is not None:
            given = tuple(argument(site.node, name) for name in (*names[:4], "is_causal", "scale"))
            site.node.target, site.node.kwargs = own, {}
            site.node.args = given  # type: ignore[assignment]
        if program.word_at(site.site) != "math" or site.ours:
            continue
        args = [argument(site.node, name) for name in names]
        if site.mask is not None and dtype_of(site.mask) is torch.bool:
            args[3] = added.get(site.mask) or added.setdefault(site.mask, _as_summand(program, site))
        options = {"scale": argument(site.node, "scale"), "enable_gqa": argument(site.node, "enable_gqa")}
        with program.graph.inserting_before(site.node):
            math = aten._scaled_dot_product_attention_math.default
            pair = program.graph.call_function(math, (*args, None), options)  # type: ignore[arg-type]
            heads = program.graph.call_function(operator.getitem, (pair, 0))
            result = inlined(program.graph, _heads_last, heads)
        assert isinstance(result, fx.Node)
        pair.meta, result.meta = {SITE: site.site}, {k: v for k, v in site.node.meta.items() if k != SITE}
        site.node.replace_all_uses_with(result)
        program.graph.erase_node(site.node)


def share_heads(graph: fx.Graph) -> None:
    """Every attention of a graph reads the keys and values that queries of a group share as they are, where
    that is so when it runs in place, wherever; what repeated them stays, for nobody.
    """
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        _group(node, everywhere=True)


def _group(node: fx.Node, *, everywhere: bool = False) -> None:
    """Keys and values that were repeated for the queries of a group are read as they are, to the same bits.

    On a CPU alone, unless said: elsewhere SDPA with a mask and fewer heads of keys takes its slow path.
    """
    if node.target is not aten.scaled_dot_product_attention.default or argument(node, "enable_gqa"):
        return
    before = [_before_repetition(argument(node, name)) for name in ("key", "value")]
    if None in before or not (everywhere or _on_cpu(node)):
        return
    given = {
        "attn_mask": argument(node, "attn_mask"),
        "dropout_p": argument(node, "dropout_p"),
        "is_causal": argument(node, "is_causal"),
    }
    node.args = (node.args[0], *before, *given.values())  # type: ignore[arg-type]
    node.kwargs = {"scale": argument(node, "scale"), "enable_gqa": True}  # type: ignore[dict-item]


def _on_cpu(node: fx.Node) -> bool:
    place: str = node.meta["val"].device.type
    return place == "cpu"


def _before_repetition(node: object) -> fx.Node | None:
    """x (B, H, S, D) of a value that holds each of its heads several times, one after the other; None for any
    other value.

    As every model writes it: a new axis behind the heads, expanded, and both axes made one.
    """
    shape = shape_of(node) if isinstance(node, fx.Node) and node.target in _MERGES else ()
    value = node.args[0] if isinstance(node, fx.Node) and len(shape) == 4 else None
    if isinstance(value, fx.Node) and value.target is aten.clone.default:
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.target is not aten.expand.default:
        return None
    inner = value.args[0]
    if (
        not isinstance(inner, fx.Node)
        or inner.target is not aten.unsqueeze.default
        or inner.args[1] not in (2, -3)
    ):
        return None
    x = inner.args[0]
    if not isinstance(x, fx.Node):
        return None
    batch, heads, rows, width = shape_of(x)
    wide = shape_of(value)
    merged = len(wide) == 5 and shape == (batch, heads * wide[2], rows, width)
    return x if merged and (*wide[:2], *wide[3:]) == (batch, heads, rows, width) else None


def _as_summand(program: Program, site: AttentionSite) -> fx.Node:
    """The boolean mask as what is added to the scores: 0 where it is true, -inf elsewhere, in the dtype of
    the query.

    `scaled_dot_product_attention` does this before it calls its decomposition; that itself would add a mask
    as 0 and 1.
    """
    dtype = dtype_of(site.node) or torch.float32
    with program.graph.inserting_before(site.node):
        result = inlined(
            program.graph,
            lambda mask: aten.to.dtype(aten.where.Scalar(mask, 0.0, -math.inf), dtype),
            site.mask,
        )
    assert isinstance(result, fx.Node)
    return result


def _heads_last(heads: torch.Tensor) -> torch.Tensor:
    """The same values in memory order (B, S, H, D): sdpa returns them so, and the `view` that follows relies
    on it.
    """
    rows = aten.clone.default(aten.transpose.int(heads, 1, 2), memory_format=torch.contiguous_format)
    return aten.transpose.int(rows, 1, 2)
