"""Adam and Lion on states of 8 bits: p, gradient and codes are read once and written once.

Definitions: effcompile.ops.states8.

A program takes ROWS blocks of BLOCK elements; `used` [ROWS, 1] says which of them there are.
"""

import triton
import triton.language as tl


@triton.jit
def _places(blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(block [ROWS, 1], element [ROWS, BLOCK], used)."""
    block = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    return block, block * BLOCK + tl.arange(0, BLOCK)[None, :], block < blocks


@triton.jit
def _read(codes, scales, table, block, element, used):
    """The state, [ROWS, BLOCK]."""
    code = tl.load(codes + element, mask=used, other=0).to(tl.int32)
    return tl.load(table + code) * tl.load(scales + block, mask=used, other=0.0)


@triton.jit
def _write(state, codes, scales, table, block, element, used):
    """Scales, and by a binary search in the table the nearest code."""
    scale = tl.maximum(tl.max(tl.abs(state), 1)[:, None], 1e-12)
    value = state / scale
    code = tl.where(value >= tl.load(table + 128), 128, 0)
    for at in tl.static_range(7):
        code += tl.where(value >= tl.load(table + code + (64 >> at)), 64 >> at, 0)
    up = tl.minimum(code + 1, 255)
    low, high = tl.load(table + code), tl.load(table + up)
    code = tl.where(value - low >= (high - low) * 0.5, up, code)
    tl.store(codes + element, code.to(tl.uint8), mask=used)
    tl.store(scales + block, scale, mask=used)


@triton.jit
def adam8_kernel(
    p,
    grad,
    first,
    first_scale,
    second,
    second_scale,
    signed,
    unsigned,
    blocks,
    lr,
    rest1,
    rest2,
    decay,
    eps,
    correct1,
    correct2,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """rest = 1 − β, correct1 = 1 − β₁ᵗ, correct2 = √(1 − β₂ᵗ)."""
    block, element, used = _places(blocks, BLOCK, ROWS)
    value = tl.load(p + element, mask=used, other=0.0).to(tl.float32)
    slope = tl.load(grad + element, mask=used, other=0.0).to(tl.float32)
    if DECOUPLED:
        value = value - lr * decay * value
    else:
        slope = slope + decay * value
    m = _read(first, first_scale, signed, block, element, used)
    v = _read(second, second_scale, unsigned, block, element, used)
    m += rest1 * (slope - m)
    v += rest2 * (slope * slope - v)
    _write(m, first, first_scale, signed, block, element, used)
    _write(v, second, second_scale, unsigned, block, element, used)
    value = value - lr * (m / correct1) / (tl.sqrt(v) / correct2 + eps)
    tl.store(p + element, value.to(p.dtype.element_ty), mask=used)


@triton.jit
def lion8_kernel(
    p,
    grad,
    first,
    first_scale,
    signed,
    blocks,
    lr,
    rest1,
    rest2,
    decay,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The same for Lion."""
    block, element, used = _places(blocks, BLOCK, ROWS)
    value = tl.load(p + element, mask=used, other=0.0).to(tl.float32)
    slope = tl.load(grad + element, mask=used, other=0.0).to(tl.float32)
    m = _read(first, first_scale, signed, block, element, used)
    turn = m + rest1 * (slope - m)
    value = (
        value - lr * decay * value - lr * (tl.where(turn > 0.0, 1.0, 0.0) - tl.where(turn < 0.0, 1.0, 0.0))
    )
    _write(m + rest2 * (slope - m), first, first_scale, signed, block, element, used)
    tl.store(p + element, value.to(p.dtype.element_ty), mask=used)
