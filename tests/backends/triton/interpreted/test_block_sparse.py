"""Block-sparse products in the mended interpreter, against float64 with the dense weight; rows without
blocks, unused capacity.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from effcompile.backends.triton import block_sparse
from effcompile.backends.triton.kernels.order import in_bands
from effcompile.ops.block_sparse import block_sparse_linear, fallback_reason

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: Blocks of W, (3 rows, 4 columns): the second row is empty, and so is the last column.
KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    block_sparse.register("cpu")


def structure(capacity: int) -> tuple[Tensor, ...]:
    """crow, col, ccol, row, perm with room for `capacity` blocks; indices beyond those in use would be out of
    range.
    """
    row, col = KEPT.nonzero(as_tuple=True)
    perm = torch.argsort(col * KEPT.shape[0] + row)
    fill = lambda t: torch.cat([t, torch.full((capacity - len(t),), 99)]).int()  # noqa: E731
    crow, ccol = (torch.cat([torch.zeros(1), KEPT.sum(axis).cumsum(0)]).int() for axis in (1, 0))
    return crow, fill(col), ccol, fill(row[perm]), fill(perm)


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("b", [16, 32])
def test_product_and_gradients(dtype: torch.dtype, b: int) -> None:
    generator = torch.Generator().manual_seed(0)
    used, capacity = int(KEPT.sum()), 7
    n, k = (size * b for size in KEPT.shape)
    values = torch.randn(capacity, b, b, generator=generator).to(dtype).requires_grad_()
    x = torch.randn(k, 2, 35, generator=generator).to(dtype).movedim(0, 2).requires_grad_()  # strided, ragged
    bias = torch.randn(n, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(2, 35, n, generator=generator).to(dtype)
    assert fallback_reason(x, b) is None
    y = block_sparse_linear(x, values, *structure(capacity), bias)
    y.backward(grad)

    wide = [t.detach().double().requires_grad_() for t in (x, values, bias)]
    blocks = torch.zeros(*KEPT.shape, b, b, dtype=torch.float64).index_put(
        KEPT.nonzero(as_tuple=True), wide[1][:used]
    )
    expected = torch.nn.functional.linear(wide[0], blocks.transpose(1, 2).reshape(n, k), wide[2])
    expected.backward(grad.double())
    for got, wanted in (
        (y, expected),
        *((leaf.grad, one.grad) for leaf, one in zip((x, values, bias), wide, strict=True)),
    ):
        assert got is not None and wanted is not None
        assert (got.detach().double() - wanted.detach()).norm() <= LIMITS[dtype] * wanted.detach().norm()


def test_other_blocks_and_dtypes_are_torchs() -> None:
    for x, b in (
        (torch.zeros(3, 24), 24),
        (torch.zeros(3, 32, dtype=torch.float64), 16),
        (torch.zeros(0, 32), 16),
    ):
        assert "Triton kernels are for" in str(fallback_reason(x, b))


@triton.jit
def _visit(counts, rows, columns, BAND: tl.constexpr):  # noqa: N803
    row, column = in_bands(tl.program_id(0), rows, columns, BAND)
    tl.store(counts + row * columns + column, tl.load(counts + row * columns + column) + 1)


@pytest.mark.parametrize(("rows", "columns", "band"), [(1, 1, 8), (5, 3, 2), (4, 7, 4), (3, 5, 8), (9, 2, 4)])
def test_every_tile_has_one_program(rows: int, columns: int, band: int) -> None:
    counts = torch.zeros(rows, columns, dtype=torch.int32)
    _visit[(rows * columns,)](counts, rows, columns, band)
    assert (counts == 1).all()
