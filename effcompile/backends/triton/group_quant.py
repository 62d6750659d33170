"""Group-wise 8-bit codes and quantised linears on tiled kernels: those operators on a device, once `register`
has been called.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from effcompile.backends.triton.configs import interpreting
from effcompile.backends.triton.kernels.group_quant import (
    dequantize_kernel,
    quantize_kernel,
    quantized_product,
)
from effcompile.backends.triton.layout import by_rows, cdiv, next_power_of_2, on
from effcompile.backends.triton.places import runs
from effcompile.ops import group_quant as op

__all__ = ["dequantize", "linear", "quantize", "register"]

_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
#: Elements that one program quantises.
_TILE = 4096
#: The narrowest product of 8-bit codes on tensor cores.
_NARROWEST = 32
#: Up to so many rows a product reads more than it multiplies; from so many on it does not.
_FEW, _MANY = 32, 512


def register(device: str) -> None:
    """Run the operators of `effcompile.ops.group_quant` on the tiled kernels on this type of device."""
    op.quantize_groups.register_kernel(device)(quantize)
    op.dequantize_groups.register_kernel(device)(dequantize)
    op.quantized_linear.register_kernel(device)(linear)


def quantize(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scales), see `effcompile::quantize_groups`."""
    op.check_groups(x, group, dtype)
    if _lacks(dtype, x.device):
        return op.quantize_by_torch(x, group, dtype)
    x = x.contiguous()
    codes, scales = (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((*x.shape[:-1], x.shape[-1] // group), dtype=torch.float32),
    )
    if scales.numel():
        block, count = _rows(group)
        with on(x):
            quantize_kernel[(cdiv(scales.numel(), count),)](
                x,
                codes,
                scales,
                scales.numel(),
                op.LARGEST[dtype],
                dtype == torch.int8,
                group,
                block,
                count,
                **_LAUNCH,
            )
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes · scale, see `effcompile::dequantize_groups`."""
    if _lacks(codes.dtype, codes.device):
        return op.dequantize_by_torch(codes, scales, dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = codes.new_empty(codes.shape, dtype=dtype)
    if out.numel():
        group = codes.shape[-1] // scales.shape[-1]
        block, count = _rows(group)
        with on(codes):
            dequantize_kernel[(cdiv(scales.numel(), count),)](
                codes, scales, out, scales.numel(), group, block, count, **_LAUNCH
            )
    return out


def linear(
    x: Tensor, codes: Tensor, scales: Tensor, x_scales: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, activation: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `effcompile::quantized_linear`.

    Groups that no block of 32 divides, and float8 where a GPU has none, are left to torch.
    """
    n, k = op.check_linear(x, codes, scales, x_scales, activation)
    group = k // scales.shape[1]
    flat = x.reshape(-1, k)
    (block_m, block_n, block_k), launch = _tile(flat.shape[0], group, x_scales is not None)
    y = x.new_empty((*x.shape[:-1], n), dtype=dtype)
    if block_k < _NARROWEST or x.dtype == torch.float64 or not y.numel() or _lacks(codes.dtype, x.device):
        return op.linear_by_torch(x, codes, scales, x_scales, bias, residual, activation, dtype)
    flat = by_rows(flat)
    precision = (
        None if x.dtype != torch.float32 else "ieee" if interpreting() or torch.version.hip else "tf32x3"
    )
    grid = (cdiv(flat.shape[0], block_m) * cdiv(n, block_n),)
    given = [None if t is None else t.contiguous() for t in (x_scales, bias, residual)]
    with on(x):
        quantized_product[grid](
            flat, codes.contiguous(), scales.contiguous(), *given, y, flat.shape[0], n, k, flat.stride(0),
            group, codes.dtype == torch.uint8, activation, block_m, block_n, block_k, precision, **launch,
        )  # fmt: skip
    return y


def _tile(rows: int, group: int, codes: bool) -> tuple[tuple[int, int, int], dict[str, int]]:
    """(rows, columns and K of a program's step; options of a launch).

    `codes`: x is in codes, too, and there is one group.

    Few rows are bound by reading the weight: narrow tiles make programs enough for all processors, and deep
    pipelines keep reads under way. Many rows of codes are bound by the tensor cores, which wider tiles feed
    from fewer reads.
    """
    block_k = 64 if codes else math.gcd(group, 128)
    if interpreting():
        return (32, 32, block_k), {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    block_m, room = max(16, min(128, next_power_of_2(rows))), 2 if torch.version.hip else 8
    block_n, warps, stages = 64, 4, min(3, room)
    if rows <= _FEW:
        block_n, block_k, stages = 32, 128 if codes else block_k, min(5, room)
    elif codes and rows >= _MANY and not torch.version.hip:
        block_n, block_k, warps = 128, 128, 8
    return (block_m, block_n, block_k), {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def _lacks(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such codes are torch's on a GPU: e4m3fn is there from compute capability 8.9 on; AMD's gfx942
    has another e4m3.
    """
    return not runs("group_quant", device) or _has_no(dtype, device)


@cache
def _has_no(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) < (8, 9)


def _rows(group: int) -> tuple[int, int]:
    """(the group's next power of two, groups per program)."""
    block = next_power_of_2(group)
    return block, max(1, _TILE // block)
