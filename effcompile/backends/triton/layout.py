"""Where kernels may point: whole tiles start at 64-bit offsets, and within a tile offsets are of 32 bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["WIDEST", "by_rows", "cdiv", "in_rows", "matrix", "next_power_of_2", "on", "row_strides"]

#: The largest stride whose product with a place within a tile (below 256) is of 32 bits.
WIDEST = (2**31 - 1) // 256


_HERE = nullcontext()


def on(t: Tensor) -> AbstractContextManager[object]:
    """The tensor's device as the current one, where kernels are launched.

    It mostly is: to enter a device takes some microseconds.
    """
    index = t.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def in_rows(t: Tensor) -> bool:
    """Whether the last stride is 1 and rows are no further apart than WIDEST. Two axes or more."""
    return t.stride(-1) == 1 and t.stride(-2) <= WIDEST


def by_rows(t: Tensor) -> Tensor:
    """The tensor, or a copy where it does not lie in rows."""
    return t if in_rows(t) else torch.clone(t, memory_format=torch.contiguous_format)


def row_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `by_rows`'s, without a copy."""
    return (t if in_rows(t) else torch.empty(t.shape, device="meta")).stride()


def matrix(t: Tensor) -> Tensor:
    """All leading axes as one, as `by_rows` leaves them."""
    return by_rows(t.reshape(-1, t.shape[-1]))


def cdiv(whole: int, part: int) -> int:
    """How many parts cover the whole.

    Triton's own takes some microseconds, since kernels may call it, too.
    """
    return -(-whole // part)


def next_power_of_2(size: int) -> int:
    """The smallest that is no less than a positive size."""
    return 1 << (size - 1).bit_length()
