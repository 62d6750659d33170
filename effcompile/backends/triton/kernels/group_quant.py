"""Group-wise 8-bit codes, and products with quantised weights with an epilogue.

Definitions and legend: effcompile.ops.group_quant.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import LOG2E
from effcompile.backends.triton.kernels.order import in_bands

#: Tiles of rows whose programs stand together.
BAND = tl.constexpr(8)


@triton.jit
def quantize_kernel(
    x,
    codes,
    scales,
    groups,
    largest,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS groups of GROUP elements (BLOCK: the next power of two) per program; contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < groups)[:, None] & (at < GROUP)[None, :]
    value = tl.load(x + row[:, None] * GROUP + at[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), 1) / largest
    scale = tl.where(scale > 0.0, scale, 1.0)
    code = tl.minimum(tl.maximum(value / scale[:, None], -largest), largest)
    if INTEGER:  # to nearest even, as torch rounds: adding and taking away 1.5 · 2²³ leaves no fraction
        code = (code + 12582912.0) - 12582912.0
    tl.store(codes + row[:, None] * GROUP + at[None, :], code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < groups)


@triton.jit
def dequantize_kernel(
    codes, scales, out, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """The inverse, with the same grid."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < groups)[:, None] & (at < GROUP)[None, :]
    value = tl.load(codes + row[:, None] * GROUP + at[None, :], mask=inside).to(tl.float32)
    value = value * tl.load(scales + row, mask=row < groups, other=0.0)[:, None]
    tl.store(out + row[:, None] * GROUP + at[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.math.exp2(-z * LOG2E))
    return z


@triton.jit
def quantized_product(
    x,
    codes,
    scales,
    x_scales,
    bias,
    residual,
    y,
    rows,
    n,
    k,
    x_stride,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y [rows, n] = activation(x Wᵀ + bias) + residual.

    BLOCK_K divides GROUP; an x of codes (x_scales given) has one group.

    Grid (⌈rows / BLOCK_M⌉ · ⌈n / BLOCK_N⌉,).
    """
    place_m, place_n = in_bands(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    start_m, start_n = place_m * BLOCK_M, place_n * BLOCK_N
    i, j = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    i64, j64 = i.to(tl.int64), j.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    for start_k in range(0, k, BLOCK_K):
        at = start_k + tl.arange(0, BLOCK_K)
        x_tile = tl.load(
            x + i64[:, None] * x_stride + at[None, :], mask=(i < rows)[:, None] & (at < k)[None, :], other=0.0
        )
        if PACKED:
            half = start_k // 2 + tl.arange(0, BLOCK_K // 2)
            pair = tl.load(
                codes + j64[:, None] * (k // 2) + half[None, :],
                mask=(j < n)[:, None] & (half < k // 2)[None, :],
                other=0x88,
            )
            w_tile = tl.reshape(tl.join(pair & 15, pair >> 4), [BLOCK_N, BLOCK_K]).to(tl.int8) - 8
        else:
            w_tile = tl.load(
                codes + j64[:, None] * k + at[None, :], mask=(j < n)[:, None] & (at < k)[None, :], other=0.0
            )
        if x_scales is None:
            scale = tl.load(scales + j64 * (k // GROUP) + start_k // GROUP, mask=j < n, other=0.0)
            part = tl.dot(x_tile, tl.trans(w_tile.to(x_tile.dtype)), input_precision=PRECISION)
            acc += part * scale[None, :]
        elif x.dtype.element_ty == tl.int8:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, out_dtype=tl.int32)
        else:
            # Hopper's tensor cores add float8 in some 14 bits (arXiv 2412.19437, 3.3.2): each step's sum is
            # taken out, and added in fp32
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, max_num_imprecise_acc=BLOCK_K)
    z = acc.to(tl.float32)
    if x_scales is not None:
        scale = tl.load(scales + j, mask=j < n, other=0.0)
        z = z * tl.load(x_scales + i, mask=i < rows, other=0.0)[:, None] * scale[None, :]
    if bias is not None:
        z += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    z = _activated(z, ACTIVATION)
    inside = (i < rows)[:, None] & (j < n)[None, :]
    if residual is not None:
        z += tl.load(residual + i64[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y + i64[:, None] * n + j[None, :], z.to(y.dtype.element_ty), mask=inside)
