"""Attention in tiles, for any visibility that tile lists and closed forms can say.

Full tiles are computed unmasked, partial ones masked, all others never visited. A softmax's denominator is
carried along the row (Rabe and Staats, arXiv 2112.05682; FlashAttention-2, Dao, arXiv 2307.08691).

Legend, of attention_backward.py too: q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] with strides (b,
h, s) and last stride 1; out [B, H, Sq, Dv] and lse, bottom, delta [B, H, Sq] contiguous; `bottom` is lse in
base 2, and +inf where a row sees nothing, so that its probabilities are 0. `bias`, `mask`: strides (b, h, i,
j), 0 where broadcast; `sink`: (b, h, i). `q_ids`, `k_ids`, `valid`: strides per batch in `row_strides`. Tile
lists as in effcompile.ops.tiles; `list_strides`: rows of the lists per (b, h), 0 where broadcast. None is "no
such term". LIST_M × LIST_N are the lists' tiles, BLOCK_M × BLOCK_N the kernels', which divide them.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import (
    LN2,
    LOG2E,
    load_rows,
    program_tile,
    scores,
    store_rows,
    tile_rows,
    visit,
)


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    bias,
    sink,
    mask,
    q_ids,
    k_ids,
    valid,
    partial_count,
    partial_index,
    full_count,
    full_index,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    sink_strides,
    mask_strides,
    row_strides,
    list_strides,
    scale,
    softcap,
    lo,
    hi,
    chunk,
    heads,
    group,
    q_len,
    k_len,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIST_M: tl.constexpr,
    LIST_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """out and lse; grid (⌈Sq / BLOCK_M⌉ · H · B,). `group`: query heads per key head."""
    start_m, h, b = program_tile(tl.program_id(0), q_len, heads, BLOCK_M, True)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    q_tile = load_rows(
        q + b64 * q_strides[0] + h64 * q_strides[1], start_m, q_strides[2], q_len, D, BLOCK_M, BLOCK_D, True
    )
    g = h // group
    if not TMA:
        k += b64 * k_strides[0] + g64 * k_strides[1]
        v += b64 * v_strides[0] + g64 * v_strides[1]
    if q_ids is not None:
        q_ids += b64 * row_strides[0]
        k_ids += b64 * row_strides[1]
    if valid is not None:
        valid += b64 * row_strides[2]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row = b * list_strides[0] + h * list_strides[1] + start_m // LIST_M
    columns = tl.cdiv(k_len, LIST_N)
    # a positive factor passes through the maximum: one multiply-add per score
    LATE: tl.constexpr = softcap is None and bias is None
    factor = scale * LOG2E
    for MASKED in tl.static_range(2):
        count = tl.load((partial_count if MASKED else full_count) + row) * (LIST_N // BLOCK_N)
        for t in range(count):
            start_n = visit(partial_index if MASKED else full_index, row, t, columns, LIST_N, BLOCK_N)
            k_tile = tile_rows(k, b, g, start_n, k_strides[2], k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
            logits, _, _ = scores(
                q_tile,
                k_tile,
                bias,
                mask,
                q_ids,
                k_ids,
                valid,
                bias_strides,
                mask_strides,
                b,
                h,
                start_m,
                start_n,
                None if LATE else scale,
                softcap,
                lo,
                hi,
                chunk,
                q_len,
                k_len,
                BLOCK_M,
                BLOCK_N,
                MASKED,
                False,
                PRECISION,
            )
            higher = tl.maximum(top, tl.max(logits, 1) * factor if LATE else tl.max(logits, 1))
            finite = higher
            if MASKED or not LATE:  # nothing seen so far: -inf − -inf would be nan
                finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.math.exp2((logits * factor if LATE else logits) - finite[:, None])
            shrink = tl.math.exp2(top - finite)
            total = total * shrink + tl.sum(weights, 1)
            v_tile = tile_rows(v, b, g, start_n, v_strides[2], k_len, DV, BLOCK_N, BLOCK_DV, MASKED, TMA)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
            top = higher
    i = start_m + tl.arange(0, BLOCK_M)
    if sink is not None:
        pointers = sink + b64 * sink_strides[0] + h64 * sink_strides[1] + i.to(tl.int64) * sink_strides[2]
        drain = tl.load(pointers, mask=i < q_len, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, drain)
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.math.exp2(drain - higher)
        acc = acc * shrink[:, None]
        top = higher
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    plane = b64 * heads + h64
    tl.store(
        lse + plane * q_len + i,
        tl.where(empty, float("-inf"), (top + tl.math.log2(tl.where(empty, 1.0, total))) * LN2),
        mask=i < q_len,
    )
    store_rows(out + plane * q_len * DV, acc, start_m, DV, q_len, DV, BLOCK_M, BLOCK_DV)
