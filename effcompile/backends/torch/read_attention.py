"""Reads off an emitted graph which attention runs at each site, with which mask, and who lists its tiles."""

from __future__ import annotations

import torch
from torch import fx

from effcompile.backends.torch.edit_attentions import SITE
from effcompile.core.mask import Edge, MaskForm
from effcompile.ir.formats import Form
from effcompile.ops.mask import BAND
from effcompile.ops.tile_predictors import STATIC
from effcompile.sites.parts import argument

aten = torch.ops.aten
#: Word → what it is where the attention hides later keys by itself.
_CAUSAL = {"sdpa": "causal", "sdpa_fp32": "causal_fp32"}


def packet(node: fx.Node) -> object:
    """What a node calls, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def attentions(module: fx.GraphModule) -> dict[str, Form]:
    """site → the kernel of each attention that has a site."""
    ours = torch.ops.effcompile
    forms: dict[object, str] = {
        aten.scaled_dot_product_attention: "sdpa",
        aten._scaled_dot_product_attention_math: "math",
        ours.bf16_attention: "sdpa_bf16",
        ours.fp32_attention: "sdpa_fp32",
        ours.int8_attention: "sdpa_int8_token",
        ours.attention: "tiled",
        ours.attention_flex: "flex",
        ours.attention_guarded: "tiled",
    }
    found = {}
    for node in module.graph.nodes:
        if SITE in node.meta and packet(node) in forms:
            word = forms[packet(node)]
            if word in _CAUSAL and argument(node, "is_causal"):
                word = _CAUSAL[word]
            found[node.meta[SITE]] = _predictor(node) or Form(
                word=word, mask=_mask(node) if word in ("tiled", "flex") else None
            )
    return found


def _mask(node: fx.Node) -> MaskForm | None:
    """The mask that an attention of ours has in closed form; None where a size of a call is a limit of it."""
    given = {a.name: argument(node, a.name) for a in node.target._schema.arguments}  # type: ignore[union-attr]
    if any(isinstance(given[name], fx.Node) for name in BAND):
        return None
    numbers = {name: value for name, value in given.items() if isinstance(value, int)}
    lo, hi = (Edge(offset=numbers[name]) if name in numbers else None for name in ("lo", "hi"))
    q_ids, k_ids, valid, mask = (
        None if given.get(name) is None else () for name in ("q_ids", "k_ids", "valid", "mask")
    )
    return MaskForm(lo=lo, hi=hi, chunk=numbers["chunk"], q_ids=q_ids, k_ids=k_ids, valid=valid, mask=mask)


def _predictor(node: fx.Node) -> Form | None:
    """Who lists the tiles that an attention visits, a predictor or constants, and how; None where nobody
    does.
    """
    if packet(node) is not torch.ops.effcompile.attention:
        return None
    tiles = argument(node, "tiles")
    if not isinstance(tiles, (list, tuple)) or not tiles:
        return None
    source = tiles[0].args[0] if tiles[0].op == "call_function" else tiles[0]
    if packet(source) is not torch.ops.effcompile.predicted_tiles:
        return Form(word=STATIC, figures=_figures(block=argument(node, "block_q")))
    settings = {name: argument(source, name) for name in ("mass", "detail", "pool", "block")}
    return Form(word=str(argument(source, "method")), figures=_figures(**settings))


def _figures(**found: object) -> tuple[tuple[str, float], ...]:
    return tuple((name, value) for name, value in found.items() if isinstance(value, (int, float)))
