"""Linears with a weight of 4 or 8 bits in groups of 32, and x rounded in the same groups: for few rows.

Definitions and the order of a weight's bytes: ops/group_codes.py.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import LOG2E

#: Below the largest value of a group that is rounded to 0.
LEAST = tl.constexpr(1e-30)


@triton.jit
def _after(z, AFTER: tl.constexpr):
    if AFTER == "gelu":
        z = 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
    elif AFTER == "gelu_tanh":
        z = z / (1.0 + tl.math.exp2((z + z * z * z * 0.044715) * -1.5957691216057308 * LOG2E))
    elif AFTER == "silu":
        z = z / (1.0 + tl.math.exp2(-z * LOG2E))
    elif AFTER == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    return z


@triton.jit
def _codes_of(words, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Words of four bytes (BLOCK_N, BITS) as codes (BLOCK_N, 32), columns as `_column` says."""
    even = tl.join(words & 255, (words >> 8) & 255)
    odd = tl.join((words >> 16) & 255, (words >> 24) & 255)
    codes = tl.join(even, odd)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4)
    return (tl.reshape(codes, [BLOCK_N, 32]) - (1 << (BITS - 1))).to(tl.int8)


@triton.jit
def _column(at, BITS: tl.constexpr):
    """Which column of a group stands where: of four bytes the first, third, second and fourth; of 4 bits each
    with that 16 columns on behind it.
    """
    byte = at if BITS == 8 else at // 2
    column = byte // 4 * 4 + byte % 4 // 2 + byte % 2 * 2
    return column if BITS == 8 else column + at % 2 * 16


@triton.jit
def grouped_codes(x, codes, scales, rows, k, groups, x_stride, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """x [rows, k] rounded in groups of 32: codes [rows, groups · 32], in the order in which those of a weight
    are unpacked, and scales [rows, groups]; of a group with an infinity or NaN codes of 0 and the scale NaN.
    Grid (⌈rows · groups / GROUPS⌉,).
    """
    one = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row, there = one // groups, one < rows * groups
    place = (one % groups)[:, None] * 32 + _column(tl.arange(0, 32), BITS)[None, :]
    inside = there[:, None] & (place < k)
    value = tl.load(x + row[:, None] * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    odd = tl.max((~(size < float("inf"))).to(tl.int32), 1) > 0
    most = tl.max(tl.where(odd[:, None], 0.0, size), 1)
    some = most > LEAST
    inverse = tl.where(some, 127.0 / tl.maximum(most, LEAST), 0.0)
    code = tl.where(odd[:, None], 0.0, value * inverse[:, None])
    code = (code + 12582912.0) - 12582912.0  # to nearest even, as torch rounds
    tl.store(codes + one[:, None] * 32 + tl.arange(0, 32)[None, :], code.to(tl.int8), mask=there[:, None])
    scale = tl.where(odd, float("nan"), tl.where(some, most / 127.0, 0.0))
    tl.store(scales + one, scale, mask=there)


@triton.jit
def grouped_product(
    x, x_scales, words, scales, bias, y, rows, n, groups, BITS: tl.constexpr, AFTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """y [rows, n] = after(x Wᵀ + bias) in fp32, x as `grouped_codes` leaves it; `words` and `scales` are the
    weight's bytes as such.

    TOGETHER groups a step: their bytes are asked for before the first is multiplied. Sums of a group are
    whole. Grid (⌈n / BLOCK_N⌉, ⌈rows / BLOCK_M⌉); a panel of 16 outputs is one piece of memory.
    """
    SIZE: tl.constexpr = 32 + 64 * BITS
    i = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, panel = j < n, j.to(tl.int64) // 16 * groups * SIZE
    piece, at = tl.arange(0, BITS), tl.arange(0, 32)
    row = i.to(tl.int64) * groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, groups, TOGETHER):
        for g in tl.static_range(TOGETHER):
            group = first + g
            known, base = there & (tl.full([BLOCK_N], group, tl.int32) < groups), panel + group * SIZE
            mine = (i < rows) & (tl.full([BLOCK_M], group, tl.int32) < groups)
            held = tl.load(
                words + (base // 4 + 8 + j % 16)[:, None] + piece[None, :] * 16, mask=known[:, None], other=0
            )
            scale = tl.load(scales + base // 2 + j % 16, mask=known, other=0.0).to(tl.float32)
            codes = tl.load(x + (row + group)[:, None] * 32 + at[None, :], mask=mine[:, None], other=0)
            x_scale = tl.load(x_scales + row + group, mask=mine, other=0.0)
            sums = tl.dot(codes, tl.trans(_codes_of(held, BITS, BLOCK_N)), out_dtype=tl.int32)
            acc += sums.to(tl.float32) * (scale[None, :] * x_scale[:, None])
    if bias is not None:
        acc += tl.load(bias + j, mask=there, other=0.0)[None, :]
    to = y + i.to(tl.int64)[:, None] * n + j[None, :]
    tl.store(to, _after(acc, AFTER), mask=(i < rows)[:, None] & there[None, :])
