"""Where kernels may point: whole tiles start at 64-bit offsets, and within a tile offsets are of 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WIDEST", "by_rows", "matrix"]

#: The largest stride whose product with a place within a tile (below 256) is of 32 bits.
WIDEST = (2**31 - 1) // 256


def by_rows(t: Tensor) -> Tensor:
    """With last stride 1 and rows no further apart than WIDEST; a copy where it is not so. Two axes or more."""
    return t if t.stride(-1) == 1 and t.stride(-2) <= WIDEST else torch.clone(t, memory_format=torch.contiguous_format)


def matrix(t: Tensor) -> Tensor:
    """All leading axes as one, as `by_rows` leaves them."""
    return by_rows(t.reshape(-1, t.shape[-1]))
