"""Weights and activations as bytes, in torch: what the compiled 8-bit linears (`int8_linear.cpp`) compute, to
the bit.

    scale = max |x| of the row / 127        code = round(x · (127 / max |x|))
    y = (codes · codesᵀ) · (scale of x · scale of W) + bias

A weight may hold a scale for each column of x, with which x is multiplied before it is coded, as W was
divided by them, and codes of x are then lowered by the middle of their row (byte_codings.py):

    scale = half / 126.5        half = (max(0, max x) − min(0, min x)) / 2
    lower = round((max(0, max x) + min(0, min x)) / 2 · (126.5 / half))
    code = round(x · (126.5 / half)) − lower
    y = (codes · codesᵀ + lower · Σ codes of W) · (scale of x · scale of W) + bias

Legend: x (M, K), W (N, K), packed (⌈N/16⌉, ⌈K/4⌉, 16, 4) of u8: code + 128, so that missing rows and columns
are 128; for a weight that is scaled and lowered as many panels more as hold the scales of columns (K) in fp32
and then the sums (N) of codes of W in s32: one, but of many rows of few columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.core.errors import UsageError

__all__ = [
    "AFTER",
    "as_given",
    "columns_of",
    "followed",
    "following",
    "linear_by_torch",
    "lowered_codes",
    "pack",
    "packed_product",
    "panels_of",
    "product_by_torch",
    "refuse_misfit",
    "refuse_unknown",
    "row_codes",
    "unpack",
]

#: A linear: a packed weight, its scales (N), and a bias.
Linear = tuple[Tensor, Tensor, Tensor | None]
#: What may follow the bias, as `int8_linear.cpp` numbers it.
AFTER = ("none", "gelu", "gelu_tanh", "silu", "relu")
#: Added to the number of what follows where the only or last weight, and the first one of two, scales columns
#: of x and lowers its codes.
_LAST_LOWERS, _FIRST_LOWERS = 256, 512
#: Rows without a larger value are rounded to 0.
_LEAST = 1e-30


def pack(codes: Tensor, columns: Tensor | None = None) -> Tensor:
    """s8 codes (N, K), −127 to 127, in the order in which the kernels read them. Behind them are scales of
    columns (K), if there are any, and the sum of each row's codes, with which codes of x are lowered.
    """
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % 4, 0, -n % 16))
    # four bytes at a time
    quads = padded.contiguous().view(torch.int32)
    tiles = quads.view(padded.shape[0] // 16, 16, quads.shape[1]).transpose(1, 2)
    tiles = tiles.clone(memory_format=torch.contiguous_format)
    packed = tiles.view(torch.uint8).view(*tiles.shape, 4) ^ 128  # + 128
    if columns is None:
        return packed
    behind = columns.float().view(torch.uint8), codes.sum(1, dtype=torch.int32).view(torch.uint8)
    panels = packed.new_zeros((panels_of(n, k, True) - len(packed), *packed.shape[1:]))
    panels.view(-1)[: 4 * (k + n)] = torch.cat(behind)
    return torch.cat([packed, panels])


def panels_of(n: int, k: int, lowers: bool) -> int:
    """Of 16 rows, as which a weight (N, K) is packed with what lies behind it."""
    return -(-n // 16) + (-(-4 * (k + n) // (64 * -(-k // 4))) if lowers else 0)


def columns_of(packed: Tensor, n: int, k: int) -> Tensor | None:
    """The scales of columns (K) of a packed weight (N, K), if it has any, and codes of x are lowered."""
    return packed[-(-n // 16) :].reshape(-1)[: 4 * k].view(torch.float32) if _lowers(packed, n) else None


def following(after: str, last: Linear, first: Linear | None = None) -> int:
    """How kernels are told what follows, one of AFTER, and which of the only or last linear and the first of
    two scale and lower.
    """
    of_last = _LAST_LOWERS if _lowers(last[0], int(last[1].shape[0])) else 0
    of_first = _FIRST_LOWERS if first is not None and _lowers(first[0], int(first[1].shape[0])) else 0
    return AFTER.index(after) | of_last | of_first


def _lowers(packed: Tensor, n: int) -> bool:
    return int(packed.shape[0]) > -(-n // 16)


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """The inverse."""
    tiles = (packed[: -(-n // 16)].to(torch.int16) - 128).to(torch.int8).transpose(1, 2)
    return tiles.reshape(16 * tiles.shape[0], -1)[:n, :k]


def row_codes(x: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """(codes as floats, of magnitudes up to the largest, scales (M, 1)); a row with an infinity or NaN has
    codes of 0 and the scale NaN.
    """
    most = x.abs().amax(1, keepdim=True)
    finite, some = most.isfinite(), most > _LEAST
    inverse = torch.where(finite & some, torch.full_like(most, largest) / most, 0.0)
    scale = torch.where(finite, torch.where(some, most / torch.full_like(most, largest), 0.0), torch.nan)
    return torch.where(finite, x * inverse, 0.0).round(), scale


def lowered_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes as floats, scales (M, 1), by how much codes are lowered (M, 1)): x ≈ scale · (code + lowered),
    where a row's numbers and 0 take all of −127 to 127; what is not finite as `row_codes` has it.
    """
    above, below = (0.5 * side.clamp(min=0).amax(1, keepdim=True) for side in (x, -x))
    half = above + below  # half of 253 steps: rounding twice may take one of 254
    finite, some = half.isfinite(), half > _LEAST
    inverse = torch.where(finite & some, torch.full_like(half, 126.5) / half, 0.0)
    scale = torch.where(finite, torch.where(some, half / torch.full_like(half, 126.5), 0.0), torch.nan)
    lower = torch.where(finite, (above - below) * inverse, 0.0).round()
    return torch.where(finite, (x * inverse).round() - lower, 0.0), scale, lower


def linear_by_torch(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str) -> Tensor:
    """What the kernels compute, slowly."""
    columns = columns_of(weight, scales.shape[0], x.shape[-1])
    return packed_product(x if columns is None else x * columns, weight, scales, bias, after)


def packed_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str) -> Tensor:
    """The same of x that is scaled."""
    n, k = scales.shape[0], x.shape[-1]
    return product_by_torch(x, unpack(weight, n, k), scales, bias, after, lowered=_lowers(weight, n))


def product_by_torch(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str, largest: int = 127,
    lowered: bool = False,
) -> Tensor:  # fmt: skip
    """The same of codes (N, K) of magnitudes up to the largest: the sums of products are exact in float64."""
    flat = x.reshape(-1, x.shape[-1])
    if not flat.numel():
        return x.new_zeros((*x.shape[:-1], scales.shape[0]))
    if lowered:
        codes, row_scales, lower = lowered_codes(flat)
        codes = codes + lower
    else:
        codes, row_scales = row_codes(flat, largest)
    sums = codes.double() @ weight.double().T
    y = sums.float() * (scales * row_scales)
    return followed(y if bias is None else y + bias, after).view(*x.shape[:-1], -1)


def refuse_misfit(
    bits: int, fitting: Callable[..., bool], x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None,
    after: str,
) -> None:  # fmt: skip
    """Raises UsageError for arguments of a linear in so many bits that do not fit; `fitting`: whether K
    columns, a weight, scales and a bias are one.
    """
    if not (x.dtype == torch.float32 and x.dim() and fitting(int(x.shape[-1]), weight, scales, bias)):
        raise UsageError(
            f"A linear in {bits} bits takes x (..., K) in float32, a weight that int{bits}_codes.pack made, "
            f"scales and a bias (N); given {as_given(x=x, weight=weight, scales=scales, bias=bias)}."
        )
    refuse_unknown(after)


def as_given(**tensors: Tensor | None) -> str:
    """Those that there are, by name, shape and dtype."""
    there = ((name, t) for name, t in tensors.items() if t is not None)
    return ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in there)


def refuse_unknown(after: str) -> None:
    """Raises UsageError for what is none of AFTER."""
    if after not in AFTER:
        raise UsageError(f"Nothing that follows a linear is named {after!r}; there are {', '.join(AFTER)}.")


def followed(y: Tensor, after: str) -> Tensor:
    """What one of AFTER makes of a product."""
    return {
        "none": lambda t: t,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }[after](y)
