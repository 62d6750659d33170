"""Block-sparse linears on tiled kernels: those of `effcompile.ops.block_sparse` on a device, once `register`
has been called.

Taken are blocks of 16, 32, 64 or 128 and the dtypes of tensor cores; the rest is torch's, as that module
says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from effcompile.backends.triton.configs import interpreting, shared_memory
from effcompile.backends.triton.kernels.block_sparse import block_sparse_product, block_sparse_sampled
from effcompile.backends.triton.layout import cdiv, matrix, on
from effcompile.backends.triton.places import runs
from effcompile.ops.block_sparse import FINDERS

__all__ = ["BlockSparseKernels", "kernels", "register"]

_BLOCKS = (16, 32, 64, 128)
#: Shared memory of the largest blocks, in bytes: two tiles of 128 × 128, twice.
_ROOM = 128 << 10
#: Side of blocks → rows, warps and stages of a program in 16 bits (H100 80GB HBM3, triton 3.6.0, 2026-11-22:
#: 16384 x 8192 x 8192, 90 %).
_MEASURED = {32: (64, 2, 4), 64: (128, 4, 3)}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def register(device: str) -> None:
    """Run block-sparse linears on the tiled kernels on this type of device."""
    FINDERS[device] = kernels


def kernels(x: Tensor, block: int) -> BlockSparseKernels | str:
    """The kernels for activations like x, or why there are none."""
    if not runs("block_sparse", x.device):
        return "the Triton kernels are not for this GPU"
    if block not in _BLOCKS:
        return f"the Triton kernels are for blocks of {', '.join(map(str, _BLOCKS))}; these are of {block}"
    if x.dtype not in _DTYPES or not x.numel():
        return (
            "the Triton kernels are for tensor cores' dtypes and for some rows; these are "
            f"{tuple(x.shape)} of {x.dtype}"
        )
    if block == _BLOCKS[-1] and x.is_cuda and (shared_memory(x.device) or _ROOM) < _ROOM:
        return f"blocks of {block} take {_ROOM >> 10} KiB of shared memory, and this GPU gives a program less"
    return BlockSparseKernels()


class BlockSparseKernels:
    """The three products, for checked arguments, see `effcompile.ops.block_sparse_native.Kernels`."""

    def linear(self, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, bias: Tensor | None) -> Tensor:
        """y (..., N) = x Wᵀ + bias."""
        return _product(x, values, crow, col, None, bias)

    def grad_input(self, grad: Tensor, values: Tensor, ccol: Tensor, row: Tensor, perm: Tensor) -> Tensor:
        """dx (..., K) = dy W."""
        return _product(grad, values, ccol, row, perm, None)

    def grad_values(self, grad: Tensor, x: Tensor, crow: Tensor, col: Tensor) -> Tensor:
        """dvalues (Z, b, b): dyᵀ x at the kept blocks, 0 in places that are not in use."""
        grad, x = matrix(grad), matrix(x)
        b = grad.shape[1] // (crow.shape[0] - 1)
        found = x.new_empty((col.shape[0], b, b))
        places = torch.arange(col.shape[0], device=x.device, dtype=torch.int32)
        rows = torch.searchsorted(crow, places, right=True, out_int32=True) - 1
        if col.shape[0]:
            with on(x):
                block_sparse_sampled[(col.shape[0],)](
                    grad, x, rows, col, found, x.shape[0], grad.stride(0), x.stride(0), crow[-1:],
                    **_tile(x, b, sampled=True)
                )  # fmt: skip
        return found


def _product(
    x: Tensor, values: Tensor, ptr: Tensor, index: Tensor, perm: Tensor | None, bias: Tensor | None
) -> Tensor:
    """By rows of blocks, or with `perm` by columns."""
    b, rows = values.shape[1], matrix(x)
    y = x.new_empty((*x.shape[:-1], (ptr.shape[0] - 1) * b))
    flat = y.view(-1, y.shape[-1])
    tile = _tile(x, b)
    with on(x):
        columns = ptr.shape[0] - 1
        block_sparse_product[(cdiv(rows.shape[0], tile["BLOCK_M"]) * columns,)](
            rows, values.contiguous(), ptr, index, perm, bias, flat, rows.shape[0], columns, rows.stride(0),
            flat.stride(0), **tile
        )  # fmt: skip
    return y


def _tile(x: Tensor, b: int, *, sampled: bool = False) -> dict[str, Any]:
    """Block sizes and options of a launch; for the products with blocks of 32 and 64 the fastest of five, as
    measured on an H100.
    """
    wide = x.dtype == torch.float32
    precision = None if not wide else "ieee" if interpreting() or torch.version.hip else "tf32x3"
    rows, warps, stages = (64 if wide else 128), (8 if b >= 64 and not wide else 4), (3 if b < 128 else 2)
    if not (wide or sampled or torch.version.hip):
        rows, warps, stages = _MEASURED.get(b, (rows, warps, stages))
    launch = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return {"BLOCK_M": 32 if interpreting() else rows, "B": b, "PRECISION": precision, **launch}
