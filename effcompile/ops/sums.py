"""What our operators add in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sum_dtype"]


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of scores, sums and functions of x; those of matrix products are the library's."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
