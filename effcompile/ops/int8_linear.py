"""A linear in 8 bits that takes and gives fp32: x is quantised row by row inside, as `int8_codes.py` defines
it.

On an x86 or ARM CPU with a C++ compiler the kernels of `int8_linear.cpp` run; elsewhere torch computes the
same. `fallback_reason` tells which. The operator is defined without torch.library.custom_op, which takes
20 µs a call where this takes 6: decoding is made of short calls.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.reasons import Unsupported
from effcompile.core.types import Shape
from effcompile.ops import int8_native as native
from effcompile.ops.instruction_sets import warn_of_torch, whose, why_torch
from effcompile.ops.int8_codes import linear_by_torch, panels_of, refuse_misfit

__all__ = ["check", "fallback_reason", "int8_linear", "refusal", "told", "workspace_bytes"]

#: Products of two codes (at most 127²) that a sum of 32 bits holds.
_DEEPEST = 1 << 17

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, str after='none', "
    "bool narrow=False) -> Tensor"
)


def fallback_reason() -> str | None:
    """Why torch computes these linears; None where the kernels do.

    The first call compiles them, some seconds, once per machine.
    """
    return why_torch(native.kernels())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    return whose(native.kernels())


def refusal(k: int) -> Unsupported | None:
    """None, or why linears of that depth are not offered in this form."""
    if k > _DEEPEST:
        return Unsupported("sums of more than {} products do not fit in 32 bits; here K = {}", (_DEEPEST, k))
    reason = fallback_reason()
    return None if reason is None else Unsupported(reason)


def int8_linear_on_cpu(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    after: str = "none",
    narrow: bool = False,
) -> Tensor:
    """after(x Wᵀ + bias), (..., N) in fp32 or, if `narrow`, in bf16, for W as `int8_codes.pack` gives it and
    its scales (N).

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    check(x, weight, scales, bias, after)
    found = native.kernels()
    if isinstance(found, str):
        warn_of_torch("Linears in 8 bits", found)
        made = linear_by_torch(x, weight, scales, bias, after)
        return made.bfloat16() if narrow else made
    return found.linear(x, weight, scales, None if bias is None else bias.contiguous(), after, narrow)


_LIBRARY.impl("int8_linear", int8_linear_on_cpu, "CPU")
int8_linear = torch.ops.effcompile.int8_linear


def check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str) -> None:
    """Raises UsageError for arguments of a linear in 8 bits that do not fit."""
    refuse_misfit(8, fits, x, weight, scales, bias, after)


def fits(k: int, weight: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    """Whether these are a linear of k columns in 8 bits."""
    n = int(scales.shape[0]) if scales.dim() == 1 else -1
    panels = {panels_of(n, k, lowers) for lowers in (False, True)} if k > 0 else ()
    packed = weight.shape in {(count, -(-k // 4), 16, 4) for count in panels} and weight.dtype == torch.uint8
    biased = bias is None or (bias.shape == (n,) and bias.dtype == torch.float32)
    whole = scales.dtype == torch.float32 and scales.is_contiguous() and weight.is_contiguous()
    return packed and biased and whole and n > 0 and 0 < k <= _DEEPEST


@torch.library.register_fake("effcompile::int8_linear", lib=_LIBRARY)
def _(x, weight, scales, bias=None, after="none", narrow=False):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], scales.shape[0]), dtype=torch.bfloat16 if narrow else None)


@register_flop_formula(torch.ops.effcompile.int8_linear)
def flops(
    x_shape: Shape,
    weight_shape: Shape,
    scales_shape: Shape,
    *args: object,
    out_shape: object = None,
    **kwargs: object,
) -> int:
    rows = 1
    for size in x_shape:
        rows *= size
    return 2 * rows * int(scales_shape[0])


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: what float64 takes.
    """
    if name != "effcompile::int8_linear" or not isinstance(args, (list, tuple)):
        return None
    x, _, scales = args[:3]
    k, n = int(x.shape[-1]), int(scales.shape[0])
    rows = int(x.numel()) // k
    return native.workspace_bytes(x) if fallback_reason() is None else 16 * (rows * (k + n) + n * k)
