"""Whether tensors hold what they held: by their object, autograd's count of changes in place, their address, and samples of their bytes.

A change under no_grad (an optimizer's step, load_state_dict) is counted in `_version`; one of `p.data` in place is not: the
samples see it. They cover small models whole; of large ones the first, the middle and the last bytes of every tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import nn

from effcompile.core import torch_compat

#: Bytes that all samples together may have: they are read and compared at each call.
_SAMPLED = 32 << 10
#: Of one tensor no more than this many bytes are sampled, and no less than the other.
_MOST, _LEAST = 4 << 10, 24
_version = attrgetter("_version")


class Watched:
    """A list of tensors with what tells, in microseconds, that one of them was changed."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._counted = [t for t in tensors if not t.is_inference()]
        self._addressed = [t for t in tensors if _has_address(t)]
        share = min(_MOST, max(_LEAST, _SAMPLED // max(1, len(self._addressed))))
        self._samples = [part for t in self._addressed for part in _sampled(t, share)]
        self._versions = list(map(_version, self._counted))
        self._addresses = list(map(torch.Tensor.data_ptr, self._addressed))
        self._bytes = b"".join(self._samples)

    def unchanged(self) -> bool:
        """Whether all are as they were. The addresses come first: a sample is read where its tensor still is."""
        return (
            list(map(_version, self._counted)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._addressed)) == self._addresses
            and b"".join(self._samples) == self._bytes
        )


def state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What `Watched` compares, of one tensor: for finding out which one it was."""
    version = 0 if tensor.is_inference() else tensor._version
    if not _has_address(tensor):
        return version, 0, b""
    return version, tensor.data_ptr(), b"".join(_sampled(tensor, _MOST))


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor in memory, not one of a subclass that computes what it is."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not torch_compat.is_fake(tensor)
    return plain and tensor.layout is torch.strided


def _sampled(tensor: torch.Tensor, share: int) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """The tensor's memory where it is read: all of it, or three parts that together have `share` bytes."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    extent = (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()
    part = share // 3
    starts = (0, (extent - part) // 2, extent - part) if extent > share else (0,)
    for start in starts:
        yield (ctypes.c_char * (part if extent > share else extent)).from_address(tensor.data_ptr() + start)
