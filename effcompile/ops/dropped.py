"""Dropout of what needs no gradient: nobody reads its mask, so there is none."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropped"]


@torch.library.custom_op("effcompile::dropped", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropped(x: Tensor, p: float) -> Tensor:
    """Eager's dropout of a tensor without gradient, by its own steps, and so with its numbers: 0 < p < 1.

    The result is all it takes.
    """
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p).mul_(x)


dropped.register_fake(lambda x, p: torch.empty_like(x))
