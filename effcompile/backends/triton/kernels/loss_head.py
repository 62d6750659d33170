"""The loss head in tiles: logits live in registers, and leave them as one number per row (forward) or as
slopes of a chunk (backward).

Legend: x [N, D], W [V, D], strides per row, last stride 1; bias [V] or None; target [N] of int64. logits =
outer · tanh(inner · z) with `outer`, else inner · z, for z = x Wᵀ + bias (Cut Your Losses, Wijmans et al.,
arXiv 2411.09009, section 4.1: the forward's indexed product and log-sum-exp in one). Logits are exponentiated
in base 2.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import LOG2E, tanh


@triton.jit
def _logits(
    x,
    weight,
    bias,
    start_m,
    start_n,
    rows,
    words,
    width,
    x_stride,
    w_stride,
    inner,
    outer,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(natural logits [BLOCK_M, BLOCK_N] in fp32, tanh), -inf beyond the vocabulary."""
    m, j, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = start_n + j
    x += start_m.to(tl.int64) * x_stride
    weight += start_n.to(tl.int64) * w_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, width, BLOCK_K):
        within = k + at < width
        x_tile = tl.load(
            x + m[:, None] * x_stride + (k + at)[None, :],
            mask=(start_m + m < rows)[:, None] & within[None, :],
            other=0.0,
        )
        w_tile = tl.load(
            weight + j[:, None] * w_stride + (k + at)[None, :],
            mask=(n < words)[:, None] & within[None, :],
            other=0.0,
        )
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < words, other=0.0).to(tl.float32)[None, :]
    capped = acc * inner
    logits = capped
    if outer is not None:
        capped = tanh(capped, PRECISION is not None)
        logits = capped * outer
    return tl.where((n < words)[None, :], logits, float("-inf")), capped


@triton.jit
def loss_head_rows(
    x,
    weight,
    bias,
    target,
    tops,
    totals,
    picks,
    rows,
    words,
    width,
    part,
    x_stride,
    w_stride,
    inner,
    outer,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Highest logit, Σ exp(logit − highest), and the target's logit, over words part · p .. part · (p + 1);
    [parts, N] each.

    Grid (⌈N / BLOCK_M⌉, parts); `part` is a multiple of BLOCK_N.
    """
    start_m, first = tl.program_id(0) * BLOCK_M, tl.program_id(1) * part
    i = start_m + tl.arange(0, BLOCK_M)
    label = tl.load(target + i, mask=i < rows, other=-1)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # no class: ignored, or an error that must be seen
    pick = tl.where((label >= 0) & (label < words), 0.0, float("nan"))
    for t in range(0, part, BLOCK_N):
        start_n = first + t
        logits, _ = _logits(
            x,
            weight,
            bias,
            start_m,
            start_n,
            rows,
            words,
            width,
            x_stride,
            w_stride,
            inner,
            outer,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
        hit = (start_n + tl.arange(0, BLOCK_N))[None, :] == label[:, None]
        pick += tl.sum(tl.where(hit, logits, 0.0), 1)
        higher = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a tile wholly beyond the vocabulary
        total = total * tl.math.exp2((top - finite) * LOG2E) + tl.sum(
            tl.math.exp2((logits - finite[:, None]) * LOG2E), 1
        )
        top = higher
    out = tl.program_id(1).to(tl.int64) * rows + i
    tl.store(tops + out, top, mask=i < rows)
    tl.store(totals + out, total, mask=i < rows)
    tl.store(picks + out, pick, mask=i < rows)


@triton.jit
def loss_head_slopes(
    x,
    weight,
    bias,
    target,
    lse,
    factor,
    slopes,
    rows,
    words,
    width,
    x_stride,
    w_stride,
    inner,
    outer,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d loss / d z [N, V] of a chunk: (softmax − one-hot) · factor · d logits / d z.

    Grid (⌈N / BLOCK_M⌉ · ⌈V / BLOCK_N⌉,).
    """
    tiles = tl.cdiv(rows, BLOCK_M)
    start_m, start_n = tl.program_id(0) % tiles * BLOCK_M, tl.program_id(0) // tiles * BLOCK_N
    i, n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    logits, capped = _logits(
        x,
        weight,
        bias,
        start_m,
        start_n,
        rows,
        words,
        width,
        x_stride,
        w_stride,
        inner,
        outer,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    label = tl.load(target + i, mask=i < rows, other=-1)
    bottom = tl.load(lse + i, mask=i < rows, other=0.0)
    weights = tl.math.exp2((logits - bottom[:, None]) * LOG2E)
    found = (weights - tl.where(n[None, :] == label[:, None], 1.0, 0.0)) * tl.load(
        factor + i, mask=i < rows, other=0.0
    )[:, None]
    found = found * ((1.0 - capped * capped) * (inner * outer) if outer is not None else inner)
    pointers = slopes + i.to(tl.int64)[:, None] * words + n[None, :]
    tl.store(pointers, found.to(slopes.dtype.element_ty), mask=(i < rows)[:, None] & (n < words)[None, :])


@triton.jit
def _logit(z, inner, outer, EXACT: tl.constexpr):
    """(logit, tanh) of what a product has left."""
    capped = z.to(tl.float32) * inner
    logit = capped
    if outer is not None:
        capped = tanh(capped, EXACT)
        logit = capped * outer
    return logit, capped


@triton.jit
def loss_head_gradients_kernel(
    z, target, factor, losses, words, inner, outer, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of z [rows, V] per program: its loss, and z overwritten by d loss / d z · factor.

    Read twice, written once.

    Highest logit and sum are kept lane by lane and united at the end (online softmax, Milakov and Gimelshein,
    arXiv 1805.02867).
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * words
    label, weight = tl.load(target + row), tl.load(factor + row)
    lane = tl.arange(0, BLOCK)
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    pick = tl.zeros([BLOCK], tl.float32)  # read in this loop, for the other one overwrites it
    for start in range(0, words, BLOCK):
        inside = start + lane < words
        logit, _ = _logit(tl.load(z + start + lane, mask=inside, other=0.0), inner, outer, EXACT)
        pick += tl.where(start + lane == label, logit, 0.0)
        higher = tl.maximum(top, tl.where(inside, logit, float("-inf")))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2((top - finite) * LOG2E) + tl.where(
            inside, tl.math.exp2((logit - finite) * LOG2E), 0.0
        )
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.math.log2(tl.sum(total * tl.math.exp2((top - highest) * LOG2E), 0)) / LOG2E
    known = (label >= 0) & (label < words)
    # no class: ignored, or an error that must be seen
    tl.store(losses + row, tl.where(known, lse - tl.sum(pick, 0), float("nan")))
    for start in range(0, words, BLOCK):
        inside = start + lane < words
        logit, capped = _logit(tl.load(z + start + lane, mask=inside, other=0.0), inner, outer, EXACT)
        slope = (tl.math.exp2((logit - lse) * LOG2E) - tl.where(start + lane == label, 1.0, 0.0)) * weight
        slope = slope * ((1.0 - capped * capped) * (inner * outer) if outer is not None else inner)
        tl.store(z + start + lane, slope.to(z.dtype.element_ty), mask=inside)
