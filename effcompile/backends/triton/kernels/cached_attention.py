"""Attention of few queries over a cache: keys are split among programs, which read each row of keys and
values once for all queries that share it (Dao et al., Flash-Decoding, 2023), and rows are appended where they
stand.

Legend: q (B, H, S, D), keys and values (B, G, K, D), H a multiple of G; r: queries that share a head of keys,
H / G · S of them, heads first.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import LOG2E

#: Below the largest value of a row that is rounded to 0 (ops/cache_rows.py).
LEAST = tl.constexpr(1e-30)


@triton.jit(do_not_specialize=["keys", "span"])
def cached_attention_part(
    q, k, v, k_scales, v_scales, mask, out, parts, tops, sums, q_strides, k_strides, v_strides, mask_strides,
    out_strides, groups, shared, queries, keys, span, scale, D: tl.constexpr, BOOLS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`span` keys, a multiple of BLOCK_N, of one head of keys. Grid (B · G, ⌈K / span⌉).

    Rows that nobody sees are not read, whatever they hold. Scores are in units of log₂. With one part the
    result goes to `out`, else sums weighted by 2^(score − top) to `parts` (B · G, parts, r, D), with tops and
    sums of weights (B · G, parts, r).
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = place // groups, place % groups
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    there, wide = r < shared * queries, d < D
    head, query = g * shared + r // queries, r % queries
    at = b * q_strides[0] + head * q_strides[1] + query * q_strides[2]
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    k += b * k_strides[0] + g * k_strides[1]
    v += b * v_strides[0] + g * v_strides[1]
    if k_scales is not None:  # four codes are as long as a scale
        k_scales += (b * k_strides[0] + g * k_strides[1]) // 4
        v_scales += (b * v_strides[0] + g * v_strides[1]) // 4
    if mask is not None:
        mask += (b * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2])[:, None]
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, keys), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = there[:, None] & (n < keys)[None, :]
        if mask is not None:
            if BOOLS:
                seen = seen & (tl.load(mask + n[None, :], mask=seen, other=0) != 0)
            else:
                added = tl.load(mask + n[None, :], mask=seen, other=float("-inf")).to(tl.float32)
                seen = seen & (added > float("-inf"))
        read = tl.max(seen.to(tl.int32), 0) > 0
        whole = read[:, None] & wide[None, :]
        n64 = n.to(tl.int64)
        k_tile = tl.load(k + n64[:, None] * k_strides[2] + d[None, :], mask=whole, other=0)
        scores = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision=PRECISION)
        scores = scores * (scale * LOG2E)
        if k_scales is not None:
            scores = scores * tl.load(k_scales + n64 * (k_strides[2] // 4), mask=read, other=0.0)[None, :]
        if mask is not None and not BOOLS:
            scores = scores + added * LOG2E
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(scores - base[:, None])
        shrink = tl.math.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        if v_scales is not None:
            weights = weights * tl.load(v_scales + n64 * (v_strides[2] // 4), mask=read, other=0.0)[None, :]
        v_tile = tl.load(v + n64[:, None] * v_strides[2] + d[None, :], mask=whole, other=0)
        product = tl.dot(weights.to(q_tile.dtype), v_tile.to(q_tile.dtype), input_precision=PRECISION)
        acc = acc * shrink[:, None] + product
        top = higher
    if parts is None:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = b * out_strides[0] + head * out_strides[1] + query * out_strides[2]
        to = out + at[:, None] + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])
    else:
        row = (place * tl.num_programs(1) + part) * (shared * queries) + r
        tl.store(parts + row[:, None] * D + d[None, :], acc, mask=there[:, None] & wide[None, :])
        tl.store(tops + row, top, mask=there)
        tl.store(sums + row, total, mask=there)


@triton.jit
def cached_attention_whole(
    parts, tops, sums, out, out_strides, groups, shared, queries, count,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The parts of one query put together; one that sees nothing is 0. Grid (B · G, r)."""
    place, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, head = place // groups, place % groups * shared + r // queries
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    row = (place * count + p) * (shared * queries) + r
    top = tl.load(tops + row, mask=p < count, other=float("-inf"))
    most = tl.max(top, 0)
    share = tl.math.exp2(top - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(share * tl.load(sums + row, mask=p < count, other=0.0), 0)
    there = (p < count)[:, None] & (d < D)[None, :]
    acc = tl.sum(share[:, None] * tl.load(parts + row[:, None] * D + d[None, :], mask=there, other=0.0), 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    to = out + b * out_strides[0] + head * out_strides[1] + (r % queries) * out_strides[2] + d
    tl.store(to, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["first"])
def append_rows(
    new, held, scales, place, new_strides, held_strides, groups, rows, first,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """New rows (B, G, rows, D) behind row `first`, or behind the one that `place` says on the GPU, of what is
    held: rounded to its dtype, or as codes with a scale behind them. Grid (B · G, rows).
    """
    head, row, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_D)
    b, g, inside = head // groups, head % groups, d < D
    at = b * new_strides[0] + g * new_strides[1] + row * new_strides[2]
    value = tl.load(new + at + d, mask=inside, other=0.0)
    if place is not None:
        first = tl.load(place)
    at = b * held_strides[0] + g * held_strides[1] + (first + row) * held_strides[2]
    if scales is None:
        tl.store(held + at + d, value.to(held.dtype.element_ty), mask=inside)
    else:
        wide = value.to(tl.float32)
        most = tl.max(tl.abs(wide), 0)
        odd = tl.max((~(tl.abs(wide) < float("inf"))).to(tl.int32), 0) > 0  # an infinity, or no number
        inverse = tl.where((most > LEAST) & ~odd, 127.0 / tl.maximum(most, LEAST), 0.0)
        code = tl.where(odd, 0.0, wide * inverse)
        code = (code + 12582912.0) - 12582912.0  # to nearest even, as torch rounds
        tl.store(held + at + d, code.to(tl.int8), mask=inside)
        scale = tl.where(odd, float("nan"), tl.where(most > LEAST, most / 127.0, 0.0))
        tl.store(scales + at // 4, scale)  # four codes are as long as a scale
