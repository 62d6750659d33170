"""What the operators that pack a dense tensor (`compress`, `bitmask`) share: its elements in the order of
memory, a slab at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["elements", "in_strides"]

_ELEMENTS = {"cpu": 1 << 17}
_ON_DEVICES = 1 << 24


def elements(x: Tensor) -> int:
    """How many are taken at a time: the workspace of a packing on a CPU is small, that on a device few
    kernels' worth.
    """
    return _ELEMENTS.get(x.device.type, _ON_DEVICES)


def in_strides(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x itself, or its copy where it lies in other strides."""
    return (
        x if list(x.stride()) == list(stride) else x.new_empty_strided(tuple(x.shape), tuple(stride)).copy_(x)
    )
