"""Values in 8 bits between forward and backward, a group of 256 elements at a time.

Definition: effcompile.ops.compress.
"""

import triton
import triton.language as tl


@triton.jit
def compress_kernel(x, steps, codes, count, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """ROWS groups per program: (low, step) in steps [groups, 2], one code per element. x in the order of
    memory.
    """
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUP)
    element = row[:, None] * GROUP + at[None, :]
    inside = element < count
    value = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, value, float("inf")), 1)
    step = (tl.max(tl.where(inside, value, float("-inf")), 1) - low) / 255.0
    code = (value - low[:, None]) / tl.where(step == 0.0, 1.0, step)[:, None]
    # to nearest even: adding and taking away 1.5 · 2²³ leaves no fraction
    code = (code + 12582912.0) - 12582912.0
    tl.store(codes + element, tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.uint8), mask=inside)
    used = row * GROUP < count
    tl.store(steps + 2 * row, low, mask=used)
    tl.store(steps + 2 * row + 1, step, mask=used)


@triton.jit
def decompress_kernel(steps, codes, x, count, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The inverse, with the same grid."""
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUP)
    element = row[:, None] * GROUP + at[None, :]
    inside, used = element < count, row * GROUP < count
    low, step = (
        tl.load(steps + 2 * row, mask=used, other=0.0),
        tl.load(steps + 2 * row + 1, mask=used, other=0.0),
    )
    value = tl.load(codes + element, mask=inside, other=0).to(tl.float32) * step[:, None] + low[:, None]
    tl.store(x + element, value.to(x.dtype.element_ty), mask=inside)
