"""Group-wise 8-bit codes, and linears with quantised weights: exact definitions in torch, which devices
replace by kernels.

    scale = max |x| of the group / largest code        codes = round(x / scale)        x ≈ codes · scale

Legend: x (..., K) in groups of `group` along its last axis, scales (..., K / group) in fp32. Codes are int8
(−127 … 127), float8_e4m3fn (largest 448) or float8_e5m2 (57344); a group of zeros has scale 1. Weights W (N,
K): int8 codes (N, K), or two 4-bit codes (−8 … 7) per byte, (N, K/2) of uint8, code + 8, the even column in
the low half, or float8_e4m3fn codes (N, K); scales (N, K / group).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.types import Args, AutogradContext, Shape
from effcompile.ops.devices import one_device

__all__ = [
    "ACTIVATIONS",
    "LARGEST",
    "dequantize_groups",
    "pack_int4",
    "quantize_groups",
    "quantized_linear",
    "unpack_int4",
]

#: dtype of codes → the largest.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: Codes of a byte each, which can be multiplied as they are.
WHOLE = (torch.int8, torch.float8_e4m3fn)
#: What an epilogue may end with.
ACTIVATIONS = ("none", "gelu", "silu")


def quantize_by_torch(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes in x's shape, scales (..., K / group)).

    Raises:
        UsageError: groups that do not divide K, or another dtype than those of LARGEST.
    """
    check_groups(x, group, dtype)
    grouped = x.float().unflatten(-1, (-1, group))
    scales = grouped.abs().amax(-1) / LARGEST[dtype]
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (grouped / scales.unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype).flatten(-2), scales


def dequantize_by_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes · scale in `dtype`."""
    group = codes.shape[-1] // scales.shape[-1]
    return (codes.float().unflatten(-1, (-1, group)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def linear_by_torch(
    x: Tensor, codes: Tensor, scales: Tensor, x_scales: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, activation: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """activation(x Wᵀ + bias) + residual, (..., N) in `dtype`.

    x (..., K) is floating (weight only), or int8 or float8_e4m3fn with x_scales (..., 1); then W is of x's
    dtype with one scale per row.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    _, k = check_linear(x, codes, scales, x_scales, activation)
    weight = unpack_int4(codes) if codes.dtype == torch.uint8 else codes
    whole = (weight.float().unflatten(1, (-1, k // scales.shape[1])) * scales.unsqueeze(2)).flatten(1)
    z = (x.float() if x_scales is None else x.float() * x_scales) @ whole.T
    z = z if bias is None else z + bias.float()
    z = {"none": lambda t: t, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[activation](
        z
    )
    return (z if residual is None else z + residual.float()).to(dtype)


quantize_groups = torch.library.custom_op("effcompile::quantize_groups", quantize_by_torch, mutates_args=())
dequantize_groups = torch.library.custom_op(
    "effcompile::dequantize_groups", dequantize_by_torch, mutates_args=()
)
quantized_linear = torch.library.custom_op("effcompile::quantized_linear", linear_by_torch, mutates_args=())


def check_groups(x: Tensor, group: int, dtype: torch.dtype) -> None:
    """Raises UsageError for what `quantize_groups` does not take."""
    if group < 1 or not x.dim() or not x.shape[-1] or x.shape[-1] % group or not x.is_floating_point():
        raise UsageError(
            f"Groups of {group} do not divide the last axis of {tuple(x.shape)} {x.dtype}: give a "
            "floating tensor and a divisor."
        )
    if dtype not in LARGEST:
        raise UsageError(f"There are no codes of {dtype}; there are those of {', '.join(map(str, LARGEST))}.")


def check_linear(
    x: Tensor, codes: Tensor, scales: Tensor, x_scales: Tensor | None, activation: str
) -> tuple[int, int]:
    """(N, K). Raises UsageError for what `quantized_linear` does not take."""
    one_device("A quantised linear", x=x, codes=codes, scales=scales, x_scales=x_scales)
    k = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1) if codes.dim() == 2 else -1
    shapes = (
        f"x {tuple(x.shape)} {x.dtype}, codes {tuple(codes.shape)} {codes.dtype}, scales "
        f"{tuple(scales.shape)}"
    )
    if (
        codes.dtype not in (*WHOLE, torch.uint8)
        or scales.dim() != 2
        or scales.shape[0] != codes.shape[0]
        or not scales.shape[1]
        or k % scales.shape[1]
    ):
        raise UsageError(
            "A quantised weight has codes (N, K) of int8 or float8_e4m3fn or (N, K/2) of uint8, and "
            f"scales (N, K / group); given {shapes}."
        )
    if x.shape[-1] != k or (x_scales is None) != (x.is_floating_point() and x.dtype not in WHOLE):
        raise UsageError(
            "A quantised linear takes x (..., K), floating, or of int8 or float8_e4m3fn with x_scales; "
            f"given {shapes}."
        )
    if x_scales is not None and (
        codes.dtype != x.dtype or scales.shape[1] != 1 or x_scales.shape != (*x.shape[:-1], 1)
    ):
        raise UsageError(
            "An x of codes takes codes of its dtype with one scale per row, and x_scales (..., 1); given "
            f"{shapes}."
        )
    if activation not in ACTIVATIONS:
        raise UsageError(f"No activation is named {activation!r}; there are {', '.join(ACTIVATIONS)}.")
    return int(codes.shape[0]), int(k)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes −8 … 7, (N, K), as (N, K/2) of uint8."""
    shifted = (codes + 8).to(torch.uint8)
    return shifted[:, 0::2] | (shifted[:, 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse: int8 (N, K)."""
    return (torch.stack([packed & 15, packed >> 4], 2).to(torch.int8) - 8).flatten(1)


@quantize_groups.register_fake
def _(x, group, dtype):  # type: ignore[no-untyped-def]
    check_groups(x, group, dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(
        (*x.shape[:-1], x.shape[-1] // group), dtype=torch.float32
    )


@dequantize_groups.register_fake
def _(codes, scales, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty(codes.shape, dtype=dtype)


@quantized_linear.register_fake
def _(x, codes, scales, x_scales, bias, residual, activation, dtype):  # type: ignore[no-untyped-def]
    n, _ = check_linear(x, codes, scales, x_scales, activation)
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


def _keep(ctx: AutogradContext, inputs: Args, output: Tensor) -> None:
    x, codes, scales, x_scales, bias, residual, activation, _ = inputs
    ctx.save_for_backward(x if activation != "none" else None, codes, scales, bias)
    ctx.activation, ctx.x_dtype, ctx.floating = activation, x.dtype, x_scales is None
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (bias, residual))


def _backward(ctx: AutogradContext, grad: Tensor) -> Args:
    """Weights are frozen: gradients reach x, bias and residual. Before an activation, z is computed again."""
    x, codes, scales, bias = ctx.saved_tensors
    slopes = grad.float()
    if ctx.activation != "none":
        if not ctx.floating:
            raise UsageError(
                "A quantised linear of codes x with an activation has no gradient: its x is a constant."
            )
        z = quantized_linear(x, codes, scales, None, bias, None, "none", torch.float32).requires_grad_()
        with torch.enable_grad():
            after = torch.nn.functional.gelu(z) if ctx.activation == "gelu" else torch.nn.functional.silu(z)
        (slopes,) = torch.autograd.grad(after, z, slopes)
    dx = None
    if ctx.floating and ctx.needs_input_grad[0]:
        weight = unpack_int4(codes) if codes.dtype == torch.uint8 else codes
        dx = slopes.to(ctx.x_dtype) @ dequantize_groups(weight, scales, ctx.x_dtype)
    db = slopes.flatten(0, -2).sum(0).to(ctx.dtypes[0]) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, db, grad.to(ctx.dtypes[1]) if ctx.needs_input_grad[5] else None, None, None


quantized_linear.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.effcompile.quantized_linear)
def _flops(
    x_shape: Shape, codes_shape: Shape, *args: object, out_shape: object = None, **kwargs: object
) -> int:
    rows = 1
    for size in x_shape:
        rows *= size
    return 2 * rows * int(codes_shape[0])
