"""Attention of a static closed form by PyTorch's FlexAttention, compiled by Inductor: forward only, as one
operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.torch_compat import unlimited_recompilation
from effcompile.core.types import Shape
from effcompile.ops.mask import BAND, declared
from effcompile.ops.visibility import Visibility

#: FlexAttention's own tiles, in queries and keys.
BLOCK = 128

_SCHEMA = f"(Tensor q, Tensor k, Tensor v, *, {declared('scale', 'softcap', *BAND)}) -> Tensor"


@torch.library.custom_op("effcompile::attention_flex", mutates_args=(), schema=_SCHEMA)
def attention_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    lo: int | None = None,
    hi: int | None = None,
    chunk: int = 0,
) -> Tensor:
    """What `effcompile::attention` returns first for the same arguments, (B, H, Sq, Dv).

    Compiled once per form and shapes.

    Rows that see nothing give 0.
    """
    blocks = _block_mask(lo, hi, chunk, int(q.shape[2]), int(k.shape[2]), q.device.type)
    score = _softcapped(softcap) if softcap else None
    with torch.no_grad(), unlimited_recompilation():
        out = _compiled()(
            q, k, v, score_mod=score, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.contiguous()


@attention_flex.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, **form: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@register_flop_formula(torch.ops.effcompile.attention_flex)
def _flops(
    q: Shape, k: Shape, v: Shape, *, lo: int | None = None, hi: int | None = None, chunk: int = 0, **_: object
) -> int:
    """Two products over the tiles that are visited, as FlexAttention computes partial ones whole."""
    visited = Visibility(lo=lo, hi=hi, chunk=chunk).tiles(BLOCK, BLOCK, q_len=q[2], k_len=k[2]).visited
    return int(2 * q[0] * q[1] * min(visited * BLOCK * BLOCK, q[2] * k[2]) * (q[3] + v[3]))


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """One compiled function for all attentions of the process; Dynamo keeps a kernel per form and shapes."""
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=64)
def _block_mask(
    lo: int | None, hi: int | None, chunk: int, q_len: int, k_len: int, device: str
) -> BlockMask | None:
    form = Visibility(lo=lo, hi=hi, chunk=chunk)
    if lo is None and hi is None and not chunk:
        return None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        for term in form.terms(b, i, j):
            seen = seen & term
        return seen

    return form.tiles(BLOCK, BLOCK, q_len=q_len, k_len=k_len).to_block_mask(visible).to(device)


@functools.lru_cache(maxsize=16)
def _softcapped(cap: float) -> Callable[..., Tensor]:
    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(value / cap)

    return score
