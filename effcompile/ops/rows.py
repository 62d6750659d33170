"""What lies between a transformer's products, as one operator each: RMSNorm with its residual sum, SwiGLU,
rotary positions.

For where no compiler fuses element-wise work. Sums and functions are in fp32 (fp64 for fp64), results in the
inputs' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.core.types import Args, AutogradContext
from effcompile.ops.devices import one_device
from effcompile.ops.sums import sum_dtype

__all__ = ["rms_norm", "rms_norm_alone", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward"]


def rms_norm_by_torch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, s, r) with s = x + residual, r = (mean s² + eps)^−½ per row and y = s · r · weight (Zhang and
    Sennrich, arXiv 1910.07467).

    x, residual, y, s (..., D), weight (D), r (..., 1) in the wide dtype. s is rounded to x's dtype before it
    is normed, as in eager.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    check_norm(x, residual, weight)
    s = x.clone() if residual is None else x + residual
    wide = s.to(sum_dtype(x))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * r * weight.to(wide.dtype)).to(x.dtype), s, r


def rms_norm_alone_by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of `rms_norm` without a residual, where nothing else is kept: for calls without a backward, as there
    is none of it.
    """
    return rms_norm_by_torch(x, None, weight, eps)[0]


def rms_norm_backward_by_torch(
    grad: Tensor, grad_s: Tensor | None, s: Tensor, weight: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """(ds, dweight): ds is the gradient of x and of the residual alike; `grad_s` is what reaches
    s besides.
    """
    wide, slopes = s.to(r.dtype), grad.to(r.dtype)
    normed, scaled = wide * r, slopes * weight.to(r.dtype)
    ds = r * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    ds = ds if grad_s is None else ds + grad_s.to(r.dtype)
    return ds.to(s.dtype), (slopes * normed).flatten(0, -2).sum(0).to(weight.dtype)


def swiglu_by_torch(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape and dtype (Shazeer, arXiv 2002.05202)."""
    check_pair(gate, up)
    wide = gate.to(sum_dtype(gate))
    return (torch.nn.functional.silu(wide) * up.to(wide.dtype)).to(gate.dtype)


def swiglu_backward_by_torch(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    wide, slopes = gate.to(sum_dtype(gate)), grad.to(sum_dtype(gate))
    on = torch.sigmoid(wide)
    return (slopes * up.to(wide.dtype) * on * (1 + wide * (1 - on))).to(gate.dtype), (slopes * wide * on).to(
        up.dtype
    )


def rotary_by_torch(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    """x (B, H, S, D) turned by cos, sin (B or 1, S, D): x · cos + [−x₂, x₁] · sin for halves x₁, x₂ (Su et
    al., arXiv 2104.09864).

    `backwards` applies the transpose, which is the gradient. The result lies in memory as x does (its axes in
    that order, dense): the view that follows an attention relies on it.

    Raises:
        UsageError: shapes that do not fit, or an odd D.
    """
    check_rotary(x, cos, sin)
    wide, c, s = (t.to(sum_dtype(x)) for t in (x, cos.unsqueeze(1), sin.unsqueeze(1)))
    half = x.shape[-1] // 2
    if backwards:
        turned = wide * s
        turned = torch.cat([turned[..., half:], -turned[..., :half]], -1)
    else:
        turned = torch.cat([-wide[..., half:], wide[..., :half]], -1) * s
    return torch.empty_like(x).copy_(wide * c + turned)


rms_norm = torch.library.custom_op("effcompile::rms_norm", rms_norm_by_torch, mutates_args=())
rms_norm_alone = torch.library.custom_op(
    "effcompile::rms_norm_alone", rms_norm_alone_by_torch, mutates_args=()
)
rms_norm_backward = torch.library.custom_op(
    "effcompile::rms_norm_backward", rms_norm_backward_by_torch, mutates_args=()
)
swiglu = torch.library.custom_op("effcompile::swiglu", swiglu_by_torch, mutates_args=())
swiglu_backward = torch.library.custom_op(
    "effcompile::swiglu_backward", swiglu_backward_by_torch, mutates_args=()
)
rotary = torch.library.custom_op("effcompile::rotary", rotary_by_torch, mutates_args=())


def check_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Raises UsageError for what `rms_norm` does not take."""
    one_device("An RMSNorm", x=x, residual=residual, weight=weight)
    if (
        weight.dim() != 1
        or not x.dim()
        or x.shape[-1] != weight.shape[0]
        or (residual is not None and residual.shape != x.shape)
    ):
        given = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}" + (
            "" if residual is None else f", residual {tuple(residual.shape)}"
        )
        raise UsageError(
            f"An RMSNorm takes x (..., D), a residual of its shape and a weight (D); given {given}."
        )


def check_pair(gate: Tensor, up: Tensor) -> None:
    """Raises UsageError for what `swiglu` does not take."""
    one_device("SwiGLU", gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UsageError(
            f"SwiGLU takes gate and up of one shape and dtype; given {tuple(gate.shape)} {gate.dtype}, "
            f"{tuple(up.shape)} {up.dtype}."
        )


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises UsageError for what `rotary` does not take."""
    one_device("Rotary positions", x=x, cos=cos, sin=sin)
    fits = (
        x.dim() == 4
        and x.shape[3] % 2 == 0
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[1:] == x.shape[2:]
    )
    if not fits or cos.shape[0] not in (1, x.shape[0]):
        given = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise UsageError(
            f"Rotary positions take x (B, H, S, D) with even D, and cos, sin (B or 1, S, D); given {given}."
        )


@rms_norm.register_fake
def _(x, residual, weight, eps):  # type: ignore[no-untyped-def]
    check_norm(x, residual, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=sum_dtype(x))


@rms_norm_alone.register_fake
def _(x, weight, eps):  # type: ignore[no-untyped-def]
    check_norm(x, None, weight)
    return x.new_empty(x.shape)


@rms_norm_backward.register_fake
def _(grad, grad_s, s, weight, r):  # type: ignore[no-untyped-def]
    return s.new_empty(s.shape), weight.new_empty(weight.shape)


@swiglu.register_fake
def _(gate, up):  # type: ignore[no-untyped-def]
    check_pair(gate, up)
    return gate.new_empty(gate.shape)


@swiglu_backward.register_fake
def _(grad, gate, up):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@rotary.register_fake
def _(x, cos, sin, backwards):  # type: ignore[no-untyped-def]
    check_rotary(x, cos, sin)
    return torch.empty_like(x)


def _keep_norm(ctx: AutogradContext, inputs: Args, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.has_residual = inputs[1] is not None


def _norm_gradients(
    ctx: AutogradContext, grad: Tensor | None, grad_s: Tensor | None, _: Tensor | None
) -> Args:
    s, weight, r = ctx.saved_tensors
    ds, dw = (grad_s, None) if grad is None else rms_norm_backward(grad, grad_s, s, weight, r)
    return ds, ds if ctx.has_residual else None, dw, None


def _keep_inputs(ctx: AutogradContext, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_turn(ctx: AutogradContext, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.backwards = inputs[3]


def _turn_gradients(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return rotary(grad, *ctx.saved_tensors, not ctx.backwards), None, None, None


rms_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)
swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors), setup_context=_keep_inputs
)
rotary.register_autograd(_turn_gradients, setup_context=_keep_turn)
