"""What the attention kernels share: tiles loaded by rows, visibility, and logits in base 2.

Device functions, no launches.

Legend: i, j are absolute query and key positions, ii, jj the same within a tile; either is a column and the
other a row, so that every function serves both orientations of the score tile. Logits are kept in base 2
(times log2 e), since the hardware's exponential is 2**x (FlashAttention, Dao, arXiv 2307.08691, section 3.1).
Whole tiles start at 64-bit offsets; within a tile 32 bits do, which the launcher checks.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    base,
    start,
    stride,
    length,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows start .. start + ROWS of a matrix [length, WIDTH] as [ROWS, BLOCK]; zeros beyond the edges.

    Last stride 1.
    """
    at, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    pointers = base + start.to(tl.int64) * stride + at * stride + d
    if MASKED:
        rows = start + at < length
        inside = rows & (d < WIDTH) if WIDTH != BLOCK else rows & (d >= 0)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=(d < WIDTH) & (at >= 0), other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def tile_rows(
    base,
    b,
    h,
    start,
    stride,
    length,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """`load_rows` of the plane of a batch and head: `base` points there, or (TMA) describes the whole tensor,
    whose tiles are copied by the tensor memory accelerator, zeros beyond the edges.
    """
    if TMA:
        tile = base.load([b, h, start, 0]).reshape(ROWS, BLOCK)
    else:
        tile = load_rows(base, start, stride, length, WIDTH, ROWS, BLOCK, MASKED)
    return tile


@triton.jit
def store_rows(
    base, value, start, stride, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The inverse of `load_rows`, in the matrix's type."""
    at, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    pointers = base + start.to(tl.int64) * stride + at * stride + d
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(start + at < length) & (d < WIDTH))


@triton.jit
def tile_pointers(base, strides, b, h, start_i, start_j, ii, jj):
    """Where a tile of a [B, H, Sq, Sk] tensor lies; stride 0 where it broadcasts. b, h, start_i, start_j are
    int64.
    """
    corner = base + b * strides[0] + h * strides[1] + start_i * strides[2] + start_j * strides[3]
    return corner + ii * strides[2] + jj * strides[3]


@triton.jit
def visible_in_tile(i, j, mask_pointers, q_ids, k_ids, valid, q_len, k_len, lo, hi, chunk):
    """Which elements may be seen, [.., ..] bool: inside the matrix, band ∧ chunk ∧ documents ∧ padding ∧
    mask. A None is no condition.
    """
    seen = (i < q_len) & (j < k_len)
    if lo is not None:
        seen = seen & (j - i >= lo)
    if hi is not None:
        seen = seen & (j - i <= hi)
    if chunk is not None:
        seen = seen & (i // chunk == j // chunk)
    if q_ids is not None:
        seen = seen & (
            tl.load(q_ids + i, mask=i < q_len, other=0) == tl.load(k_ids + j, mask=j < k_len, other=0)
        )
    if valid is not None:
        seen = seen & (tl.load(valid + j, mask=j < k_len, other=0) != 0)
    if mask_pointers is not None:
        seen = seen & (tl.load(mask_pointers, mask=seen, other=0) != 0)
    return seen


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh by 2**x: libdevice has no interpreter.

    PRECISE: a series near 0, where the quotient cancels (relative error ≤ 2e-7).
    """
    e = tl.math.exp2(x * (2.0 * LOG2E))
    far = 1.0 - 2.0 / (e + 1.0)
    if PRECISE:
        y = x * x
        series = -0.3333333333 + y * (
            0.1333333333 + y * (-0.0539682540 + y * (0.0218694885 - y * 0.0088632355))
        )
        far = tl.where(y < 0.0625, x + x * y * series, far)
    return far


@triton.jit
def logits_of(products, bias_pointers, seen, scale, softcap, MASKED: tl.constexpr, PRECISE: tl.constexpr):
    """(base-2 logits, tanh of the softcap) of q·k: softcap · tanh(q·k · scale / softcap) + bias, -inf where
    not seen.

    Without a scale the products as they are, for who scales them himself.
    """
    if scale is None:
        capped, logits = products, products
    elif softcap is not None:
        capped = tanh(products * (scale / softcap), PRECISE)
        logits = capped * (softcap * LOG2E)
    else:
        capped = products
        logits = products * (scale * LOG2E)
    if bias_pointers is not None:
        if MASKED:
            bias = tl.load(bias_pointers, mask=seen, other=0.0)
        else:
            bias = tl.load(bias_pointers)
        logits += bias.to(tl.float32) * LOG2E
    if MASKED:
        logits = tl.where(seen, logits, float("-inf"))
    return logits, capped


@triton.jit
def visit(index, row, t, columns, LIST: tl.constexpr, BLOCK: tl.constexpr):
    """Where the t-th tile of BLOCK starts in a row of a list whose tiles are LIST long; columns is the list's
    width.
    """
    parts: tl.constexpr = LIST // BLOCK
    return tl.load(index + row.to(tl.int64) * columns + t // parts) * LIST + (t % parts) * BLOCK


@triton.jit
def program_tile(pid, length, heads, BLOCK: tl.constexpr, DOWN: tl.constexpr):
    """(start, h, b) of a program: tiles of one head side by side, so that they share what they read.

    What a causal mask leaves the most work goes first: the last tile of queries (DOWN), or the first of keys.
    """
    tiles = tl.cdiv(length, BLOCK)
    start = (tiles - 1 - pid % tiles) * BLOCK if DOWN else (pid % tiles) * BLOCK
    return start, (pid // tiles) % heads, pid // (tiles * heads)


@triton.jit
def scores(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(base-2 logits, tanh, seen) of one tile, [M, N], or [N, M] if TRANSPOSED."""
    if TRANSPOSED:
        ii, jj = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    else:
        ii, jj = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    b64, h64, m64, n64 = b.to(tl.int64), h.to(tl.int64), start_m.to(tl.int64), start_n.to(tl.int64)
    bias_pointers = None
    if bias is not None:
        bias_pointers = tile_pointers(bias, bias_strides, b64, h64, m64, n64, ii, jj)
    seen = ii + jj >= 0
    if MASKED:
        mask_pointers = None
        if mask is not None:
            mask_pointers = tile_pointers(mask, mask_strides, b64, h64, m64, n64, ii, jj)
        seen = visible_in_tile(
            start_m + ii, start_n + jj, mask_pointers, q_ids, k_ids, valid, q_len, k_len, lo, hi, chunk
        )
    logits, capped = logits_of(products, bias_pointers, seen, scale, softcap, MASKED, PRECISION is not None)
    return logits, capped, seen
