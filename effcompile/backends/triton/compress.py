"""`effcompile::compress8` and `decompress8` on kernels of their own: one read and one write, no working
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effcompile.backends.triton.kernels.compress import compress_kernel, decompress_kernel
from effcompile.backends.triton.layout import cdiv, on
from effcompile.backends.triton.places import runs
from effcompile.ops import compress as op
from effcompile.ops.compress import GROUP, parts
from effcompile.ops.slabs import in_strides

__all__ = ["compress", "decompress", "register"]

#: Groups that one program takes.
_ROWS = 8


def register(device: str) -> None:
    """Run the operators on the kernels on this type of device."""
    op.compress.register_kernel(device)(compress)
    op.decompress.register_kernel(device)(decompress)


def compress(x: Tensor, stride: list[int]) -> Tensor:
    """See `effcompile::compress8`."""
    if not runs("compress", x.device):
        return op.pack_by_torch(x, stride)
    x = in_strides(x, stride)
    packed = torch.empty(op.packed_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    if x.numel():
        with on(x):
            compress_kernel[_grid(x)](x, *parts(packed, x.numel()), x.numel(), GROUP, _ROWS)
    return packed


def decompress(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """See `effcompile::decompress8`."""
    if not runs("compress", packed.device):
        return op.unpack_by_torch(packed, size, stride, dtype)
    x = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    if x.numel():
        with on(x):
            decompress_kernel[_grid(x)](*parts(packed, x.numel()), x, x.numel(), GROUP, _ROWS)
    return x


def _grid(x: Tensor) -> tuple[int]:
    return (cdiv(x.numel(), GROUP * _ROWS),)
