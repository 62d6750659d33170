"""The mask of a dropout whose tensor is divided among ranks: each draws that of the whole, and has its part.

So ranks whose generators stand alike draw what one process does, and stand alike afterwards; what they have
is as independent as what one process has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["MASK_PART", "mask_part", "workspace_bytes"]

_NAME = "effcompile::mask_part"


@torch.library.custom_op(_NAME, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def mask_part(x: Tensor, p: float, axis: int, index: int, count: int) -> Tensor:
    """What is kept (bool) of x, which is the `index`-th of `count` equal runs along an axis; 0 < p < 1.

    By the steps of torch's native_dropout of the whole, and so with its numbers.
    """
    size = x.shape[axis]
    whole = torch.empty(
        (*x.shape[:axis], count * size, *x.shape[axis + 1 :]), dtype=torch.bool, device=x.device
    ).bernoulli_(1 - p)
    return whole.narrow(axis, index * size, size).clone(memory_format=torch.contiguous_format)


@mask_part.register_fake
def _(x, p, axis, index, count):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.bool)


MASK_PART = torch.ops.effcompile.mask_part.default


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes of the whole mask; None where `name` is another operator."""
    if name != _NAME:
        return None
    x, count = args[0], args[4]
    assert isinstance(x, Tensor) and isinstance(count, int)
    return count * x.numel()
