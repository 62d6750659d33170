"""Attentions, and what predicts their tiles, as single calls to time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from effcompile.backends.torch.measure_linears import Body
from effcompile.core.torch_compat_narrow import has_bf16_products
from effcompile.core.types import Forward
from effcompile.machine.target import Dims
from effcompile.ops import bf16_attention, fp32_attention, int8_attention
from effcompile.ops import flex_attention as _registers  # noqa: F401 - the operators that are timed
from effcompile.ops.tile_predictors import METHODS
from effcompile.ops.tiles import TileList
from effcompile.ops.torch_attention import runs_in
from effcompile.sites.attention import predictor as _registers_too  # noqa: F401 - the same


def _attention(function: Forward) -> Callable[[Dims, str], Body]:
    """Heads split from and merged to (B, S, H·D), as in the model."""

    def make(dims: Dims, engine: str) -> Body:
        b, h, sq, sk, d = dims
        q, k, v = (torch.randn(b, s, h, d).transpose(1, 2) for s in (sq, sk, sk))
        return lambda: function(q, k, v).transpose(1, 2).reshape(b, sq, h * d)

    return make


def _bf16_attention(dims: Dims, engine: str) -> Body | None:
    """None on a GPU, and where neither a kernel of ours nor oneDNN has such products."""
    on_cpu = torch.get_default_device().type == "cpu"
    there = bf16_attention.fallback_reason() is None or (has_bf16_products() and runs_in(torch.bfloat16))
    return _attention(bf16_attention.bf16_attention.default)(dims, engine) if on_cpu and there else None


def _seeing(function: Forward) -> Callable[[Dims, str], Body]:
    """The same where a query sees `visible` keys in the mean: the band on its left that does so, or all
    before it.
    """

    def make(dims: Dims, engine: str) -> Body:
        b, h, sq, sk, d, visible = dims
        q, k, v = (torch.randn(b, s, h, d).transpose(1, 2) for s in (sq, sk, sk))
        lo, hi = _band(sq, sk, visible)
        return lambda: function(q, k, v, lo, hi).transpose(1, 2).reshape(b, sq, h * d)

    return make


def _band(sq: int, sk: int, visible: int) -> tuple[int | None, int | None]:
    """(lo, hi) of a band in which a query sees about `visible` of sk keys in the mean."""
    if visible >= sk:
        return None, None
    if visible > sk // 2:  # more than causal shows
        return None, sk - sq + 2 * (visible - sk // 2)
    return sk - sq - visible + 1, sk - sq


def _fp32_attention(dims: Dims, engine: str) -> Body | None:
    """None where there is no kernel of ours."""
    return _attention(fp32_attention.fp32_attention.default)(dims, engine) if _has_fp32() else None


def _int8_attention(dims: Dims, engine: str) -> Body | None:
    """None where there is no kernel of ours: what torch makes of it is its definition."""
    on_cpu = torch.get_default_device().type == "cpu"
    run = int8_attention.int8_attention.default
    return _attention(run)(dims, engine) if on_cpu and int8_attention.fallback_reason() is None else None


def _causal_fp32(dims: Dims, engine: str) -> Body | None:
    run = fp32_attention.fp32_attention.default
    return _seeing(lambda q, k, v, *_: run(q, k, v, None, True))(dims, engine) if _has_fp32() else None


def _has_fp32() -> bool:
    return torch.get_default_device().type == "cpu" and fp32_attention.fallback_reason() is None


def _tiles(dims: Dims, engine: str) -> Body:
    """Tiles drawn at random for each head, and the diagonal."""
    b, h, sq, sk, d, visible, block = dims
    q, k, v = (torch.randn(b, s, h, d).transpose(1, 2) for s in (sq, sk, sk))
    rows, columns = -(-sq // block), -(-sk // block)
    diagonal = torch.zeros(rows, columns, dtype=torch.bool)
    diagonal[torch.arange(rows), torch.arange(rows).clamp(max=columns - 1)] = True
    others = min(columns - 1, max(0, round(visible / block) - 1))
    ranks = torch.rand(1, h, rows, columns).masked_fill(diagonal, 2.0).argsort(-1).argsort(-1)
    form = {"block_q": block, "block_k": block}
    found = TileList.from_grids(
        diagonal.expand(1, h, -1, -1), ranks < others, q_len=sq, k_len=sk, **form
    ).tensors()[:4]
    run = torch.ops.effcompile.attention
    return lambda: (
        run(q, k, v, tiles=found, scale=d**-0.5, hi=sk - sq, **form)[0].transpose(1, 2).reshape(b, sq, h * d)
    )


def _predictor(dims: Dims, engine: str, *, method: str) -> Body:
    """The lists of tiles for queries that may see `visible` keys each."""
    b, h, sq, sk, d, visible, pool, block, detail = dims
    q, k = (torch.randn(b, s, h, d).transpose(1, 2) for s in (sq, sk))
    lo, hi = _band(sq, sk, visible)
    factors = [torch.randn(h, d, detail) for _ in range(2)] if METHODS[method].fitted else None
    form = {
        "method": method,
        "detail": detail,
        "pool": pool,
        "block": block,
        "mass": 0.95,
        "scale": d**-0.5,
        "lo": lo,
        "hi": hi,
    }
    return lambda: torch.ops.effcompile.predicted_tiles(q, k, None, factors, **form)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lo: int | None, hi: int | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.effcompile.attention(q, k, v, scale=q.shape[3] ** -0.5, lo=lo, hi=hi)[0]
    return result


def _tiled_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lo: int | None, hi: int | None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.effcompile.attention(
        q, k, v, scale=q.shape[3] ** -0.5, softcap=50.0, lo=lo, hi=hi
    )[0]
    return result


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lo: int | None, hi: int | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.effcompile.attention_flex(
        q, k, v, scale=q.shape[3] ** -0.5, lo=lo, hi=hi
    )
    return result


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]


#: Steps of a tape (ops/tape.py) wherever they are timed.
_ON_TAPES = ("attention/sdpa_fp32", "attention/sdpa_int8_token", "attention/causal_fp32")


def is_on_tapes(kernel: str) -> bool:
    """Whether it is a step of a tape, so that no call of Python is its own."""
    by_tiles = kernel == "attention/sdpa_bf16" and bf16_attention.fallback_reason() is None  # else oneDNN's
    return by_tiles or kernel in _ON_TAPES


#: Kernel → makes the call that is timed.
ATTENTIONS: Mapping[str, Callable[[Dims, str], Body | None]] = {
    "attention/sdpa": _attention(F.scaled_dot_product_attention),
    "attention/sdpa_bf16": _bf16_attention,
    "attention/sdpa_fp32": _fp32_attention,
    "attention/sdpa_int8_token": _int8_attention,
    "attention/math": _attention(_math),
    "attention/causal": _seeing(_causal),
    "attention/causal_fp32": _causal_fp32,
    "attention/tiled": _seeing(_tiled),
    "attention/tiled_scores": _seeing(_tiled_scores),
    "attention/flex": _seeing(_flex),
    "attention/tiles": _tiles,
    **{f"predict/{method}": functools.partial(_predictor, method=method) for method in METHODS},
}
