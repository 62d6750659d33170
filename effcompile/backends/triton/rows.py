"""RMSNorm, SwiGLU and rotary positions on kernels of their own: `effcompile.ops.rows` on a device, once `register` has been called."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from effcompile.backends.triton.kernels.rows import (
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rotary_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)
from effcompile.ops import rows as op

__all__ = ["norm", "norm_backward", "register", "rotary", "swiglu", "swiglu_backward"]

#: The widest row that one program holds, in elements; rows of a norm's backward per program; elements per program of SwiGLU.
_WIDEST, _PER, _SPAN = 1 << 15, 16, 1024


def register(device: str) -> None:
    """Run the operators on the kernels on this type of device."""
    for operator, kernel in ((op.rms_norm, norm), (op.rms_norm_backward, norm_backward), (op.swiglu, swiglu),
                             (op.swiglu_backward, swiglu_backward), (op.rotary, rotary)):  # fmt: skip
        operator.register_kernel(device)(kernel)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, s, r), see `effcompile::rms_norm`."""
    op.check_norm(x, residual, weight)
    if not _takes(x) or x.shape[-1] > _WIDEST:
        return op.rms_norm_by_torch(x, residual, weight, eps)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y, s, r = x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    with torch.cuda.device_of(x):
        rms_norm_kernel[(r.numel(),)](x, residual, weight.contiguous(), y, s, r, x.shape[-1], eps, triton.next_power_of_2(x.shape[-1]))
    return y, s, r


def norm_backward(grad: Tensor, grad_s: Tensor | None, s: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(ds, dweight), see `effcompile::rms_norm_backward`."""
    if not _takes(s) or s.shape[-1] > _WIDEST:
        return op.rms_norm_backward_by_torch(grad, grad_s, s, weight, r)
    grad, s, r, grad_s = grad.contiguous(), s.contiguous(), r.contiguous(), None if grad_s is None else grad_s.contiguous()
    rows, width = r.numel(), s.shape[-1]
    ds, parts = s.new_empty(s.shape), s.new_empty((triton.cdiv(rows, _PER), width), dtype=torch.float32)
    with torch.cuda.device_of(s):
        rms_norm_backward_kernel[(parts.shape[0],)](
            grad, grad_s, s, weight.contiguous(), r, ds, parts, rows, width, _PER, triton.next_power_of_2(width)
        )  # fmt: skip
    return ds, parts.sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `effcompile::swiglu`."""
    op.check_pair(gate, up)
    if not _takes(gate):
        return op.swiglu_by_torch(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape)
    with torch.cuda.device_of(gate):
        swiglu_kernel[(triton.cdiv(y.numel(), _SPAN),)](gate, up, y, y.numel(), _SPAN)
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    if not _takes(gate):
        return op.swiglu_backward_by_torch(grad, gate, up)
    grad, gate, up = (t.contiguous() for t in (grad, gate, up))
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    with torch.cuda.device_of(gate):
        swiglu_backward_kernel[(triton.cdiv(gate.numel(), _SPAN),)](grad, gate, up, dgate, dup, gate.numel(), _SPAN)
    return dgate, dup


def rotary(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    """See `effcompile::rotary`."""
    op.check_rotary(x, cos, sin)
    if not _takes(x):
        return op.rotary_by_torch(x, cos, sin, backwards)
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x.new_empty(x.shape)
    b, h, s, d = x.shape
    with torch.cuda.device_of(x):
        rotary_kernel[(b * s,)](
            x, cos, sin, y, x.stride()[:3], s * d if cos.shape[0] > 1 else 0, h, s, d // 2, triton.next_power_of_2(d // 2), backwards
        )  # fmt: skip
    return y


def _takes(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0
