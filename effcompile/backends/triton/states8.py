"""Adam and Lion on states of 8 bits, one kernel per parameter: `effcompile::adam8` and `lion8` on a device,
once registered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effcompile.backends.triton.kernels.states8 import adam8_kernel, lion8_kernel
from effcompile.backends.triton.layout import cdiv, on
from effcompile.backends.triton.places import runs
from effcompile.ops import states8 as op
from effcompile.ops.states8 import BLOCK, FUSED

__all__ = ["adam", "lion", "register"]

#: Blocks that one program takes.
_ROWS = 4
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def register(device: str) -> None:
    """Run the updates on the kernels on this type of device, and optimizers with states of 8 bits on the
    updates.
    """
    op.adam8.register_kernel(device)(adam)
    op.lion8.register_kernel(device)(lion)
    FUSED.add(device)


def adam(
    p: Tensor, grad: Tensor, first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor,
    signed: Tensor, unsigned: Tensor, lr: float, beta1: float, beta2: float, decay: float, eps: float,
    step: int, decoupled: bool,
) -> None:  # fmt: skip
    """See `effcompile::adam8`."""
    states = (first, first_scale, second, second_scale)
    op.check(p, grad, (first, second), (first_scale, second_scale), (signed, unsigned))
    if not _takes(p):
        op.adam8_by_torch(p, grad, *states, signed, unsigned, lr, beta1, beta2, decay, eps, step, decoupled)
    elif p.numel():
        corrections = 1 - beta1**step, math.sqrt(1 - beta2**step)
        with on(p):
            adam8_kernel[_grid(p)](
                p, grad.contiguous(), *states, signed, unsigned, p.numel() // BLOCK, float(lr), 1 - beta1,
                1 - beta2, float(decay), float(eps), *corrections, decoupled, BLOCK, _ROWS, **_LAUNCH,
            )  # fmt: skip


def lion(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    first_scale: Tensor,
    signed: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    decay: float,
) -> None:
    """See `effcompile::lion8`."""
    op.check(p, grad, (first,), (first_scale,), (signed,))
    if not _takes(p):
        op.lion8_by_torch(p, grad, first, first_scale, signed, lr, beta1, beta2, decay)
    elif p.numel():
        with on(p):
            lion8_kernel[_grid(p)](
                p, grad.contiguous(), first, first_scale, signed, p.numel() // BLOCK, float(lr), 1 - beta1,
                1 - beta2, float(decay), BLOCK, _ROWS, **_LAUNCH,
            )  # fmt: skip


def _takes(p: Tensor) -> bool:
    return p.dtype in _DTYPES and runs("states8", p.device)


def _grid(p: Tensor) -> tuple[int]:
    return (cdiv(p.numel(), BLOCK * _ROWS),)
