"""Products with a block-sparse weight: only the kept blocks are read or made.

After MegaBlocks (Gale et al., arXiv 2211.15841, section 5).

Legend: W [N, K] in blocks of B × B: values [Z, B, B], rows of blocks crow [N/B + 1] with columns col [Z];
columns of blocks ccol [K/B + 1] with rows row [Z] and perm [Z], the block's place in values. x [M, K] and y,
dy [M, N] with strides per row, last stride 1.
"""

import triton
import triton.language as tl

from effcompile.backends.triton.kernels.order import in_bands

#: Tiles of rows whose programs stand together: 2048 rows of 16 bits and 8192 columns are 32 MiB, which L2
#: holds.
BAND = tl.constexpr(16)


@triton.jit
def _rows(x, start_m, stride, column, rows, BLOCK_M: tl.constexpr, B: tl.constexpr):
    """Rows start_m .. of a block column of x, [BLOCK_M, B]."""
    m = tl.arange(0, BLOCK_M)
    pointers = (
        x
        + start_m.to(tl.int64) * stride
        + column.to(tl.int64) * B
        + m[:, None] * stride
        + tl.arange(0, B)[None, :]
    )
    return tl.load(pointers, mask=(start_m + m < rows)[:, None], other=0.0)


@triton.jit
def block_sparse_product(
    x,
    values,
    ptr,
    index,
    perm,
    bias,
    y,
    rows,
    columns,
    x_stride,
    y_stride,
    BLOCK_M: tl.constexpr,
    B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = x Wᵀ + bias by rows of blocks (ptr crow, index col), or, where there is a perm, y = x W by columns
    (ptr ccol, index row).

    Grid (⌈M / BLOCK_M⌉ · blocks of y's width,).
    """
    place, out = in_bands(tl.program_id(0), tl.cdiv(rows, BLOCK_M), columns, BAND)
    start_m = place * BLOCK_M
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    acc = tl.zeros([BLOCK_M, B], tl.float32)
    for z in range(tl.load(ptr + out), tl.load(ptr + out + 1)):
        x_tile = _rows(x, start_m, x_stride, tl.load(index + z), rows, BLOCK_M, B)
        if perm is not None:
            block = tl.load(values + tl.load(perm + z).to(tl.int64) * (B * B) + at)
        else:
            block = tl.trans(tl.load(values + (tl.zeros([], tl.int64) + z) * (B * B) + at))
        acc = tl.dot(x_tile, block, acc, input_precision=PRECISION)
    n = out * B + tl.arange(0, B)
    if bias is not None:
        acc += tl.load(bias + n).to(tl.float32)[None, :]
    m = tl.arange(0, BLOCK_M)
    pointers = y + start_m.to(tl.int64) * y_stride + m[:, None] * y_stride + n[None, :]
    tl.store(pointers, acc.to(y.dtype.element_ty), mask=(start_m + m < rows)[:, None])


@triton.jit
def block_sparse_sampled(
    grad,
    x,
    block_row,
    col,
    found,
    rows,
    grad_stride,
    x_stride,
    used,
    BLOCK_M: tl.constexpr,
    B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """found [Z, B, B] = dyᵀ x at the kept blocks, 0 in the places beyond `used` (a pointer to their number).

    Grid (Z,).
    """
    z = tl.program_id(0)
    acc = tl.zeros([B, B], tl.float32)
    if z < tl.load(used):
        out, column = tl.load(block_row + z), tl.load(col + z)
        for start in range(0, rows, BLOCK_M):
            start_m = start + tl.zeros([], tl.int32)
            g_tile = _rows(grad, start_m, grad_stride, out, rows, BLOCK_M, B)
            acc = tl.dot(
                tl.trans(g_tile),
                _rows(x, start_m, x_stride, column, rows, BLOCK_M, B),
                acc,
                input_precision=PRECISION,
            )
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(found + z.to(tl.int64) * (B * B) + at, acc.to(found.dtype.element_ty))
