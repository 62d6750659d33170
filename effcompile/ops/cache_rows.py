"""Rows of a cache in 8 bits: the codes of a row, and behind them its scale in fp32, so that a row is one
piece of memory.

    scale = max |x| / 127        codes = round(x · (127 / max |x|))        x ≈ codes · scale

A row with an infinity or NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bytes of a row's scale, behind its codes.
SCALE = 4
_LEAST = 1e-30


def as_codes(rows: Tensor) -> Tensor:
    """(…, D) → (…, D + 4) of s8."""
    wide = rows.float()
    most = wide.abs().amax(-1, keepdim=True)
    some, finite = most > _LEAST, most.isfinite()
    inverse = torch.where(some & finite, 127 / most, torch.zeros_like(most))
    scales = torch.where(
        finite, torch.where(some, most / 127, torch.zeros_like(most)), torch.full_like(most, torch.nan)
    )
    codes = (wide * inverse).round_().nan_to_num_(0.0).to(torch.int8)  # in place: a prompt's rows are many
    return torch.cat([codes, scales.contiguous().view(torch.int8)], -1)


def as_numbers(held: Tensor) -> Tensor:
    """(…, D + 4) of s8 → (…, D) in fp32."""
    scales = held[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return held[..., :-SCALE].float().mul_(scales)


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of that dtype gives them back, in their own dtype."""
    return (as_numbers(as_codes(rows)) if dtype is torch.int8 else rows.to(dtype)).to(rows.dtype)


def held_width(width: int, dtype: torch.dtype) -> int:
    """Elements of a row of so many numbers as a cache of that dtype holds it."""
    return width + SCALE if dtype is torch.int8 else width


def into(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of that dtype holds them."""
    return as_codes(rows) if dtype is torch.int8 and rows.dtype is not torch.int8 else rows
