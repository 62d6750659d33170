"""RMSNorm with its residual sum, SwiGLU, rotary positions: one read and one write of each element.

Definitions: effcompile.ops.rows.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.attention_parts import LOG2E


@triton.jit
def rms_norm_kernel(x, residual, weight, y, s, r, width, eps, BLOCK: tl.constexpr):
    """One row per program; contiguous. s and r are written where they are asked for."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * width + d, d < width
    value = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
    if s is not None:
        tl.store(s + at, value, mask=inside)
    value = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    if r is not None:
        tl.store(r + row, inverse)
    scaled = value * inverse * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, scaled.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    grad, grad_s, s, weight, r, ds, parts, rows, width, PER: tl.constexpr, BLOCK: tl.constexpr
):
    """ds, and dweight summed over the program's PER rows in parts [programs, width], fp32."""
    d = tl.arange(0, BLOCK)
    inside = d < width
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * PER
    for row in range(first, tl.minimum(first + PER, rows)):
        at = row * width + d
        inverse = tl.load(r + row)
        normed = tl.load(s + at, mask=inside, other=0.0).to(tl.float32) * inverse
        slopes = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += slopes * normed
        slopes = slopes * scale
        slopes = inverse * (slopes - normed * (tl.sum(slopes * normed, 0) / width))
        if grad_s is not None:
            slopes += tl.load(grad_s + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + at, slopes.to(ds.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * width + d, total, mask=inside)


@triton.jit
def swiglu_kernel(gate, up, y, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    """silu(gate) · up for BLOCK columns of a row, rows gate_stride and up_stride apart: halves of one product
    are read where they lie.
    """
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    g = tl.load(gate + row * gate_stride + d, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + d, (g / (1.0 + tl.math.exp2(-g * LOG2E)) * u).to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def swiglu_backward_kernel(grad, gate, up, dgate, dup, size, BLOCK: tl.constexpr):
    """(dgate, dup), contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g, u = (
        tl.load(gate + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(up + at, mask=inside, other=0.0).to(tl.float32),
    )
    slopes = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    on = 1.0 / (1.0 + tl.math.exp2(-g * LOG2E))
    tl.store(dgate + at, (slopes * u * on * (1.0 + g * (1.0 - on))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (slopes * g * on).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    y,
    strides,
    y_strides,
    turn_stride,
    heads,
    length,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """One (b, s) per program, HEADS heads at once: cos and sin are read once. x and y (B, H, S, D) with
    neighbours of D side by side.
    """
    b, at, d = (
        tl.program_id(0).to(tl.int64) // length,
        tl.program_id(0).to(tl.int64) % length,
        tl.arange(0, BLOCK),
    )
    inside = d < HALF
    turn = b * turn_stride + at * (2 * HALF) + d
    c1, c2 = (
        tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32),
        tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32),
    )
    s1, s2 = (
        tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32),
    )
    c1, c2, s1, s2 = c1[None, :], c2[None, :], s1[None, :], s2[None, :]
    for first in range(0, heads, HEADS):
        h = (first + tl.arange(0, HEADS))[:, None]
        there = (h < heads) & inside[None, :]
        source = x + b * strides[0] + h.to(tl.int64) * strides[1] + at * strides[2] + d[None, :]
        x1, x2 = (
            tl.load(source, mask=there, other=0.0).to(tl.float32),
            tl.load(source + HALF, mask=there, other=0.0).to(tl.float32),
        )
        if BACKWARDS:
            y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
        else:
            y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
        out = y + b * y_strides[0] + h.to(tl.int64) * y_strides[1] + at * y_strides[2] + d[None, :]
        tl.store(out, y1.to(y.dtype.element_ty), mask=there)
        tl.store(out + HALF, y2.to(y.dtype.element_ty), mask=there)
