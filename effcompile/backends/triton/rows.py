"""RMSNorm, SwiGLU and rotary positions on kernels of their own: `effcompile.ops.rows` on a device, once
`register` has been called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effcompile.backends.triton.kernels.rows import (
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rotary_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)
from effcompile.backends.triton.layout import cdiv, next_power_of_2, on
from effcompile.backends.triton.places import runs
from effcompile.ops import rows as op

__all__ = ["norm", "norm_alone", "norm_backward", "register", "rotary", "swiglu", "swiglu_backward"]

#: The widest row that one program holds, in elements, in a norm and in its backward, which holds five; rows
#: of a norm's backward per program; elements per program of SwiGLU.
_WIDEST, _WIDEST_BACKWARD, _PER, _SPAN = 1 << 15, 1 << 14, 16, 1024
#: Elements that a rotation's program turns at once, in each half: 16 B a thread and load.
_TURNED = 1 << 10
#: Elements of a row per warp: of the backward's registers nothing is spilled (8 KB per thread at 16384 with
#: four warps, 68 B with 16).
_PER_WARP = 1 << 10


def register(device: str) -> None:
    """Run the operators on the kernels on this type of device."""
    for operator, kernel in (
        (op.rms_norm, norm),
        (op.rms_norm_alone, norm_alone),
        (op.rms_norm_backward, norm_backward),
        (op.swiglu, swiglu),
        (op.swiglu_backward, swiglu_backward),
        (op.rotary, rotary),
    ):
        operator.register_kernel(device)(kernel)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, s, r), see `effcompile::rms_norm`."""
    op.check_norm(x, residual, weight)
    if not _takes(x) or x.shape[-1] > _WIDEST:
        return op.rms_norm_by_torch(x, residual, weight, eps)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y, s, r = x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    block = next_power_of_2(x.shape[-1])
    with on(x):
        rms_norm_kernel[(r.numel(),)](
            x, residual, weight.contiguous(), y, s, r, x.shape[-1], eps, block, num_warps=_warps(block)
        )
    return y, s, r


def norm_alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `effcompile::rms_norm_alone`."""
    op.check_norm(x, None, weight)
    if not _takes(x) or x.shape[-1] > _WIDEST:
        return op.rms_norm_alone_by_torch(x, weight, eps)
    x, y = x.contiguous(), x.new_empty(x.shape)
    block = next_power_of_2(x.shape[-1])
    with on(x):
        rms_norm_kernel[(x.numel() // x.shape[-1],)](
            x, None, weight.contiguous(), y, None, None, x.shape[-1], eps, block, num_warps=_warps(block)
        )  # fmt: skip
    return y


def norm_backward(
    grad: Tensor, grad_s: Tensor | None, s: Tensor, weight: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """(ds, dweight), see `effcompile::rms_norm_backward`."""
    if not _takes(s) or s.shape[-1] > _WIDEST_BACKWARD:
        return op.rms_norm_backward_by_torch(grad, grad_s, s, weight, r)
    grad, s, r, grad_s = (
        grad.contiguous(),
        s.contiguous(),
        r.contiguous(),
        None if grad_s is None else grad_s.contiguous(),
    )
    rows, width = r.numel(), s.shape[-1]
    ds, parts, block = (
        s.new_empty(s.shape),
        s.new_empty((cdiv(rows, _PER), width), dtype=torch.float32),
        next_power_of_2(width),
    )
    with on(s):
        rms_norm_backward_kernel[(parts.shape[0],)](
            grad, grad_s, s, weight.contiguous(), r, ds, parts, rows, width, _PER, block,
            num_warps=_warps(block)
        )  # fmt: skip
    return ds, parts.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    """Warps of a program that holds a row."""
    return max(4, min(16, block // _PER_WARP))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `effcompile::swiglu`."""
    op.check_pair(gate, up)
    if not _takes(gate):
        return op.swiglu_by_torch(gate, up)
    gate, up = _in_rows(gate), _in_rows(up)
    y, width = gate.new_empty(gate.shape), gate.shape[-1]
    span = min(_SPAN, next_power_of_2(width))
    with on(gate):
        swiglu_kernel[(y.numel() // width, cdiv(width, span))](
            gate, up, y, width, _apart(gate), _apart(up), span
        )
    return y


def _in_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy where its rows are not equally far apart with neighbours next to each other."""
    steps = [x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2)]
    return x if x.dim() > 1 and x.stride(-1) == 1 and all(steps) else x.contiguous()


def _apart(x: Tensor) -> int:
    """Elements between the rows of what `_in_rows` returns."""
    return x.stride(-2) if x.dim() > 1 else x.shape[0]


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    if not _takes(gate):
        return op.swiglu_backward_by_torch(grad, gate, up)
    grad, gate, up = (t.contiguous() for t in (grad, gate, up))
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    with on(gate):
        swiglu_backward_kernel[(cdiv(gate.numel(), _SPAN),)](grad, gate, up, dgate, dup, gate.numel(), _SPAN)
    return dgate, dup


def rotary(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    """See `effcompile::rotary`."""
    op.check_rotary(x, cos, sin)
    if not _takes(x) or x.stride(3) != 1:
        return op.rotary_by_torch(x, cos, sin, backwards)
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    b, h, s, d = x.shape
    block = next_power_of_2(d // 2)
    together = min(next_power_of_2(h), max(1, _TURNED // block))
    with on(x):
        rotary_kernel[(b * s,)](
            x, cos, sin, y, x.stride()[:3], y.stride()[:3], s * d if cos.shape[0] > 1 else 0, h, s, d // 2,
            block, together, backwards
        )  # fmt: skip
    return y


def _takes(x: Tensor) -> bool:
    return (
        x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0 and runs("rows", x.device)
    )
