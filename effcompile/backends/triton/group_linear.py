"""Linears with weights in groups on a kernel of their own: `effcompile.ops.group_linear` on a device, once
`register` has been called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effcompile.backends.triton.configs import interpreting
from effcompile.backends.triton.kernels.group_linear import grouped_codes, grouped_product
from effcompile.backends.triton.layout import cdiv, next_power_of_2, on
from effcompile.backends.triton.places import runs
from effcompile.ops import elsewhere
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.group_codes import GROUP, bits_of

__all__ = ["linear", "register"]

#: Rows of a program at the most; groups of a step; outputs from which on a program has twice as many; groups
#: that a program rounds.
_ROWS, _TOGETHER, _MANY, _AT_ONCE = 64, 4, 1 << 14, 32


def register(device: str) -> None:
    """Run the operator on the kernel on this type of device."""
    elsewhere.put("group_linear", device, linear)


def linear(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor | None:
    """See `effcompile::group_linear`; None where the kernel is not right on this device."""
    if not runs("group_linear", x.device):
        return None
    flat, bits = flat_rows(x), bits_of(weight)
    rows, k = flat.shape
    y, groups = x.new_empty((*x.shape[:-1], n)), weight.shape[1]
    codes = x.new_empty((rows, groups * GROUP), dtype=torch.int8)
    scales = x.new_empty((rows, groups))
    block_m, block_n = max(16, min(_ROWS, next_power_of_2(max(1, rows)))), 32 if n < _MANY else 64
    stages = 1 if interpreting() else 3
    if rows:
        with on(x):
            grouped_codes[(cdiv(rows * groups, _AT_ONCE),)](
                flat, codes, scales, rows, k, groups, flat.stride(0), bits, _AT_ONCE, num_warps=4,
                enable_fp_fusion=True,
            )  # fmt: skip
            grouped_product[(cdiv(n, block_n), cdiv(rows, block_m))](
                codes, scales, weight.view(torch.int32), weight.view(torch.bfloat16), bias, y, rows, n,
                groups, bits, after, block_m, block_n, _TOGETHER, num_warps=4, num_stages=stages,
                enable_fp_fusion=True,
            )  # fmt: skip
    return y
