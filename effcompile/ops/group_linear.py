"""A linear with a weight of 4 or 8 bits in groups of 32 that takes and gives fp32: x is quantised in the same
groups inside.

`group_codes.py` defines it. On an x86 or ARM CPU with a C++ compiler the kernels of `group_linear.cpp` run,
made for few rows: with one, it is as fast as its weight is read. Many rows run in those of `group_tiles.cpp`
where a CPU has AMX. Elsewhere torch computes the same. As `int8_linear.py`, it is defined without custom_op.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.reasons import Unsupported
from effcompile.core.types import Shape
from effcompile.ops import elsewhere, group_codes, group_tiles
from effcompile.ops import group_native as native
from effcompile.ops.instruction_sets import warn_of_torch, whose, why_torch
from effcompile.ops.int8_codes import as_given, refuse_unknown

__all__ = ["fallback_reason", "group_linear", "misfit", "refusal", "told", "workspace_bytes"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("group_linear(Tensor x, Tensor weight, int n, Tensor? bias=None, str after='none') -> Tensor")


def fallback_reason() -> str | None:
    """Why torch computes these linears; None where the kernels do.

    The first call compiles them, some seconds, once per machine.
    """
    return why_torch(native.kernels())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    few = native.kernels()
    many = few if isinstance(few, str) else group_tiles.kernels()
    return whose(few) if isinstance(many, str) else f"{whose(few)}; {many.isa} from {group_tiles.ROWS} rows"


def misfit(group: int) -> Unsupported | None:
    """None, or that groups are not of the size of this form."""
    if group == group_codes.GROUP:
        return None
    return Unsupported(
        "our 4- and 8-bit weights come in groups of {name}, not of {}", (str(group_codes.GROUP), group)
    )


def refusal(group: int) -> Unsupported | None:
    """None, or why linears with groups of that size are not offered in this form on a processor."""
    if (wrong := misfit(group)) is not None:
        return wrong
    reason = fallback_reason()
    return None if reason is None else Unsupported(reason)


def group_linear_on_cpu(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, after: str = "none"
) -> Tensor:
    """after(x Wᵀ + bias), (..., n) in fp32, for W as `group_codes.pack` gives it.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    _check(x, weight, n, bias, after)
    if elsewhere.any_on("cpu"):
        return _on_gpu(x, weight, n, bias, after)
    found = native.kernels()
    if isinstance(found, str):
        warn_of_torch("Linears with weights in groups", found)
        return group_codes.linear_by_torch(x, weight, n, bias, after)
    best = group_tiles.kernels_for(x) or found
    return best.linear(x, weight, n, None if bias is None else bias.contiguous(), after)


def _on_gpu(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, after: str = "none") -> Tensor:
    """The same by a kernel of the GPU's own, where there is one (backends/triton), else by torch."""
    _check(x, weight, n, bias, after)
    own = elsewhere.kernel("group_linear", x)
    made: Tensor | None = None if own is None else own(x, weight, n, bias, after)
    return group_codes.linear_by_torch(x, weight, n, bias, after) if made is None else made


_LIBRARY.impl("group_linear", group_linear_on_cpu, "CPU")
_LIBRARY.impl("group_linear", _on_gpu, "CUDA")
group_linear = torch.ops.effcompile.group_linear


def _check(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> None:
    k = x.shape[-1] if x.dim() else 0
    fits = (
        group_codes.bits_of(weight)
        and weight.shape[:2] == (-(-n // 16), -(-k // group_codes.GROUP))
        and weight.is_contiguous()
    )
    biased = bias is None or (bias.shape == (n,) and bias.dtype == torch.float32)
    if not (fits and biased and x.dtype == torch.float32 and n > 0 and k > 0):
        raise UsageError(
            f"A linear with {n} outputs takes x (..., K) in float32, a weight that group_codes.pack made "
            f"and a bias (N); given {as_given(x=x, weight=weight, bias=bias)}."
        )
    refuse_unknown(after)


@torch.library.register_fake("effcompile::group_linear", lib=_LIBRARY)
def _(x, weight, n, bias=None, after="none"):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n))


@register_flop_formula(torch.ops.effcompile.group_linear)
def _flops(
    x_shape: Shape, weight_shape: Shape, n: int, *args: object, out_shape: object = None, **kwargs: object
) -> int:
    rows = 1
    for size in x_shape:
        rows *= size
    return 2 * rows * n


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: the codes of W, twice in fp32.
    """
    if name != "effcompile::group_linear" or not isinstance(args, (list, tuple)):
        return None
    x, _, n = args[:3]
    k = int(x.shape[-1])
    if fallback_reason() is not None:
        return 8 * (int(x.numel()) + n * k + int(x.numel()) // k * n)
    many = group_tiles.kernels_for(x)
    return native.workspace_bytes(x) if many is None else many.workspace_bytes(x)
