"""The gradients of attention in tiles. The legend stands in attention_forward.py.

The probabilities are made again from lse, in two kernels: one walks a row of tiles for dQ, one a column for
dK and dV, over all query heads that share the key head. Neither is atomic.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import (
    LOG2E,
    load_rows,
    program_tile,
    scores,
    store_rows,
    tile_pointers,
    tile_rows,
    visit,
)


@triton.jit
def attention_delta(
    out,
    grad,
    lse,
    delta,
    bottom,
    grad_strides,
    heads,
    q_len,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = Σ_d out · grad in fp32, the softmax's own term of the backward, and bottom; grid as in the
    forward.
    """
    start_m, h, b = program_tile(tl.program_id(0), q_len, heads, BLOCK_M, True)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    plane = b64 * heads + h64
    o_tile = load_rows(out + plane * q_len * DV, start_m, DV, q_len, DV, BLOCK_M, BLOCK_DV, True).to(
        tl.float32
    )
    g_base = grad + b64 * grad_strides[0] + h64 * grad_strides[1]
    g_tile = load_rows(g_base, start_m, grad_strides[2], q_len, DV, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    i = start_m + tl.arange(0, BLOCK_M)
    tl.store(delta + plane * q_len + i, tl.sum(o_tile * g_tile, 1), mask=i < q_len)
    base2 = tl.load(lse + plane * q_len + i, mask=i < q_len, other=0.0) * LOG2E
    tl.store(
        bottom + plane * q_len + i, tl.where(base2 == float("-inf"), float("inf"), base2), mask=i < q_len
    )


@triton.jit
def _softmax_rows(bottom, delta, plane, start_m, q_len, BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """(bottom, delta) of a tile's rows."""
    i = start_m + tl.arange(0, BLOCK_M)
    if MASKED:
        found = tl.load(bottom + plane * q_len + i, mask=i < q_len, other=float("inf"))
        own = tl.load(delta + plane * q_len + i, mask=i < q_len, other=0.0)
    else:
        found = tl.load(bottom + plane * q_len + i)
        own = tl.load(delta + plane * q_len + i)
    return found, own


@triton.jit
def _add_bias_gradient(
    dbias,
    dbias_strides,
    slopes,
    seen,
    b,
    h,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """A tile's part of the bias's gradient: stored, or added where several tiles share an element
    (ATOMIC).
    """
    ii, jj = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    inside = ii + jj >= 0
    if MASKED:
        inside = seen
    if SUM_ROWS:
        slopes, inside, ii = (
            tl.sum(slopes, 0, keep_dims=True),
            tl.max(inside.to(tl.int32), 0, keep_dims=True) > 0,
            tl.zeros([1, 1], tl.int32),
        )
    if SUM_COLUMNS:
        slopes, inside, jj = (
            tl.sum(slopes, 1, keep_dims=True),
            tl.max(inside.to(tl.int32), 1, keep_dims=True) > 0,
            tl.zeros([1, 1], tl.int32),
        )
    pointers = tile_pointers(
        dbias,
        dbias_strides,
        b.to(tl.int64),
        h.to(tl.int64),
        start_m.to(tl.int64),
        start_n.to(tl.int64),
        ii,
        jj,
    )
    if ATOMIC:
        tl.atomic_add(pointers, slopes, mask=inside, sem="relaxed")
    else:
        tl.store(pointers, slopes.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def attention_dq(
    q,
    k,
    v,
    grad,
    bottom,
    delta,
    dq,
    dbias,
    bias,
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
    grad_strides,
    bias_strides,
    dbias_strides,
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
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """dq, contiguous, and dbias if wanted (zeros before); grid as in the forward."""
    start_m, h, b = program_tile(tl.program_id(0), q_len, heads, BLOCK_M, True)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    plane = b64 * heads + h64
    q_tile = load_rows(
        q + b64 * q_strides[0] + h64 * q_strides[1], start_m, q_strides[2], q_len, D, BLOCK_M, BLOCK_D, True
    )
    g_base = grad + b64 * grad_strides[0] + h64 * grad_strides[1]
    g_tile = load_rows(g_base, start_m, grad_strides[2], q_len, DV, BLOCK_M, BLOCK_DV, True)
    lowest, own = _softmax_rows(bottom, delta, plane, start_m, q_len, BLOCK_M, True)
    g = h // group
    if not TMA:
        k += b64 * k_strides[0] + g64 * k_strides[1]
        v += b64 * v_strides[0] + g64 * v_strides[1]
    if q_ids is not None:
        q_ids += b64 * row_strides[0]
        k_ids += b64 * row_strides[1]
    if valid is not None:
        valid += b64 * row_strides[2]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row = b * list_strides[0] + h * list_strides[1] + start_m // LIST_M
    columns = tl.cdiv(k_len, LIST_N)
    for MASKED in tl.static_range(2):
        count = tl.load((partial_count if MASKED else full_count) + row) * (LIST_N // BLOCK_N)
        for t in range(count):
            start_n = visit(partial_index if MASKED else full_index, row, t, columns, LIST_N, BLOCK_N)
            k_tile = tile_rows(k, b, g, start_n, k_strides[2], k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
            v_tile = tile_rows(v, b, g, start_n, v_strides[2], k_len, DV, BLOCK_N, BLOCK_DV, MASKED, TMA)
            logits, capped, seen = scores(
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
                scale,
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
            weights = tl.math.exp2(logits - lowest[:, None])
            slopes = weights * (tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION) - own[:, None])
            if dbias is not None:
                _add_bias_gradient(
                    dbias,
                    dbias_strides,
                    slopes,
                    seen,
                    b,
                    h,
                    start_m,
                    start_n,
                    BLOCK_M,
                    BLOCK_N,
                    MASKED,
                    SUM_ROWS,
                    SUM_COLUMNS,
                    ATOMIC,
                )
            if softcap is not None:
                slopes = slopes * (1.0 - capped * capped)
            acc = tl.dot(slopes.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    store_rows(dq + plane * q_len * D, acc * scale, start_m, D, q_len, D, BLOCK_M, BLOCK_D)


@triton.jit
def attention_dkdv(
    q,
    k,
    v,
    grad,
    bottom,
    delta,
    dk,
    dv,
    bias,
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
    grad_strides,
    bias_strides,
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
    """dk and dv, contiguous, over the transposed lists; grid (⌈Sk / BLOCK_N⌉ · Hkv · B,).

    `heads`: those of q.
    """
    start_n, g, b = program_tile(tl.program_id(0), k_len, heads // group, BLOCK_N, False)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    k_tile = load_rows(
        k + b64 * k_strides[0] + g64 * k_strides[1], start_n, k_strides[2], k_len, D, BLOCK_N, BLOCK_D, True
    )
    v_tile = load_rows(
        v + b64 * v_strides[0] + g64 * v_strides[1], start_n, v_strides[2], k_len, DV, BLOCK_N, BLOCK_DV, True
    )
    if q_ids is not None:
        q_ids += b64 * row_strides[0]
        k_ids += b64 * row_strides[1]
    if valid is not None:
        valid += b64 * row_strides[2]
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    columns = tl.cdiv(q_len, LIST_M)
    for h in range(g * group, g * group + group):
        h64 = g64 * group + (h - g * group)
        plane = b64 * heads + h64
        q_base, g_base = q, grad
        if not TMA:
            q_base = q + b64 * q_strides[0] + h64 * q_strides[1]
            g_base = grad + b64 * grad_strides[0] + h64 * grad_strides[1]
        row = b * list_strides[0] + h * list_strides[1] + start_n // LIST_N
        for MASKED in tl.static_range(2):
            count = tl.load((partial_count if MASKED else full_count) + row) * (LIST_M // BLOCK_M)
            for t in range(count):
                start_m = visit(partial_index if MASKED else full_index, row, t, columns, LIST_M, BLOCK_M)
                q_tile = tile_rows(
                    q_base, b, h, start_m, q_strides[2], q_len, D, BLOCK_M, BLOCK_D, MASKED, TMA
                )
                g_tile = tile_rows(
                    g_base, b, h, start_m, grad_strides[2], q_len, DV, BLOCK_M, BLOCK_DV, MASKED, TMA
                )
                lowest, own = _softmax_rows(bottom, delta, plane, start_m, q_len, BLOCK_M, MASKED)
                logits, capped, _ = scores(
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
                    h64,
                    start_m,
                    start_n,
                    scale,
                    softcap,
                    lo,
                    hi,
                    chunk,
                    q_len,
                    k_len,
                    BLOCK_M,
                    BLOCK_N,
                    MASKED,
                    True,
                    PRECISION,
                )
                weights = tl.math.exp2(logits - lowest[None, :])
                dv_acc = tl.dot(weights.to(g_tile.dtype), g_tile, dv_acc, input_precision=PRECISION)
                slopes = weights * (
                    tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION) - own[None, :]
                )
                if softcap is not None:
                    slopes = slopes * (1.0 - capped * capped)
                dk_acc = tl.dot(slopes.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    plane = b64 * (heads // group) + g64
    store_rows(dk + plane * k_len * D, dk_acc * scale, start_n, D, k_len, D, BLOCK_N, BLOCK_D)
    store_rows(dv + plane * k_len * DV, dv_acc, start_n, DV, k_len, DV, BLOCK_N, BLOCK_DV)
