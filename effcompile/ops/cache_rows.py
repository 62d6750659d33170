"""Rows of a cache in 8 or 4 bits: the codes of a row, and behind them its scales, so that a row is one piece
of memory.

    s8, a scale in fp32 for a row:
        scale = max |x| / 127     codes = round(x · (127 / max |x|))                  x ≈ codes · scale
    u8, two codes of 4 bits in each, a scale in bf16 for each 32 numbers, or for those that are left:
        scale = the number of largest magnitude / −8     codes = round(x / scale) in −8 … 7

A group of so many numbers has its first half in the lower bits of its bytes, its second half in the upper
ones, raised by 8. What has an infinity or NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bytes of a row's scale, behind its codes of 8 bits; numbers that share one of 4 bits.
SCALE, GROUP = 4, 32
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
    """(…, D + 4) of s8, or (…, D / 2 + 2 · ⌈D / 32⌉) of u8 → (…, D) in fp32."""
    if held.dtype is torch.uint8:
        return _of_pairs(held)
    scales = held[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return held[..., :-SCALE].float().mul_(scales)


def as_pairs(rows: Tensor) -> Tensor:
    """(…, D) → (…, D / 2 + 2 · ⌈D / 32⌉) of u8, of an even D."""
    made = [_packed(part) for part in _groups(rows.float())]
    return torch.cat([*(codes for codes, _ in made), *(scales for _, scales in made)], -1)


def _groups(rows: Tensor) -> list[Tensor]:
    """(…, D) → (…, groups, 32), and (…, 1, rest) where there is one."""
    whole = rows.shape[-1] // GROUP * GROUP
    found = [rows[..., :whole].unflatten(-1, (-1, GROUP))] if whole else []
    return found + ([rows[..., None, whole:]] if whole < rows.shape[-1] else [])


def _packed(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(…, N, G) → bytes of codes (…, N · G / 2), and of scales (…, 2 · N)."""
    low, high = groups.amin(-1), groups.amax(-1)
    top = torch.where(high > -low, high, low)
    finite, some = low.isfinite() & high.isfinite(), top.abs() > _LEAST
    scales = torch.where(some & finite, top / -8, torch.zeros_like(top)).bfloat16()
    apart = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    taken = torch.where((some & finite)[..., None], groups, torch.zeros_like(groups))
    codes = taken.div_(apart[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    half = groups.shape[-1] // 2
    pairs = codes[..., :half] | codes[..., half:] << 4
    scales = scales.masked_fill_(~finite, torch.nan)
    return pairs.flatten(-2), scales.view(torch.uint8)


def _of_pairs(held: Tensor) -> Tensor:
    """See `as_numbers`. A whole group has 18 bytes."""
    width = held.shape[-1] // 18 * GROUP + max(0, held.shape[-1] % 18 - 2) * 2
    codes, scales = held[..., : width // 2], held[..., width // 2 :]
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    made = held.new_empty((*held.shape[:-1], width), dtype=torch.float32)
    at = 0
    for group, part in enumerate(_groups(made)):
        count, half = part.shape[-2], part.shape[-1] // 2
        pairs = codes[..., at : at + count * half].unflatten(-1, (count, half))
        part[..., :half], part[..., half:] = pairs & 15, pairs >> 4
        first = group * (scales.shape[-1] - 1)
        part.sub_(8).mul_(scales[..., first : first + count, None])
        at += count * half
    return made


#: dtype of codes → what makes them.
CODED = {torch.int8: as_codes, torch.uint8: as_pairs}


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of that dtype gives them back, in their own dtype."""
    return (as_numbers(CODED[dtype](rows)) if dtype in CODED else rows.to(dtype)).to(rows.dtype)


def held_width(width: int, dtype: torch.dtype) -> int:
    """Elements of a row of so many numbers as a cache of that dtype holds it."""
    if dtype is torch.uint8:
        return width // 2 + 2 * -(-width // GROUP)
    return width + SCALE if dtype is torch.int8 else width


def into(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a cache of that dtype holds them."""
    return CODED[dtype](rows) if dtype in CODED and rows.dtype is not dtype else rows
