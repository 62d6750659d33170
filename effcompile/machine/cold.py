"""Caches emptied before a timing: in a model the other layers have pushed out what is timed.

Linears of few rows take the time of reading their weights, memory-bound operators of a training step that of
their operands. As many copies in turn as were thought to exceed the caches
were read at 60 to 76 GB/s in a virtual machine that says it has 32 MiB of last level, whose memory gives 24.
"""

from __future__ import annotations

import functools
from time import perf_counter

import torch
from torch import Tensor

from effcompile.machine.target import KernelCall

#: Rows up to which the weight is most of what is read.
FEW_ROWS = 16
#: Rows from which on a product takes some 50 times as long as reading its weight from memory does: there is
#: no need of copies that no cache holds.
MANY_ROWS = 256
#: Weights below which a whole model may stay in a cache.
_LEAST = 1 << 18
#: Bytes that are read in a row, and copies of one linear at the most.
_ENOUGH, _MOST_COPIES = 12 << 20, 24
#: Bytes that are more than the last-level caches that we saw.
_BYTES = 1 << 27
#: Bytes of a program that stay in the last level, and that surely leave nothing else there.
_STAYS, _EMPTIES = 64 << 20, 256 << 20


def reads_weights(call: KernelCall) -> bool:
    """Whether it is such a linear."""
    dense = call.kernel.startswith("linear/") and call.format is not None
    return dense and call.dims[0] <= FEW_ROWS and call.dims[1] * call.dims[2] >= _LEAST


def cold_copies(nbytes: int) -> int:
    """Linears of so many bytes in a row, after the caches were emptied: enough that starting is little."""
    return max(1, min(_MOST_COPIES, _ENOUGH // nbytes))


@functools.cache
def _buffer(nbytes: int = _BYTES) -> Tensor:
    return torch.ones(nbytes // 4, device="cpu")


def evict(nbytes: int = _BYTES) -> None:
    """Read so much that nothing else is left in the processor's caches, or what as many bytes leave of it."""
    _buffer(nbytes).sum()


def pushed_out(nbytes: int) -> int:
    """Bytes that are read between two uses of a value by a program that touches so many in all: a power of
    two, at most what empties every cache that we saw (a virtual machine's last level of 480 MB kept 100 MB);
    0 where all may stay.
    """
    return 0 if nbytes < _STAYS else 1 << min(_EMPTIES, nbytes).bit_length() - 1


class OtherValues:
    """Other values of a program, of so many bytes, that are read between two uses of one."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self) -> None:
        """Leave in the caches what they leave of it."""
        evict(self.nbytes)

    @functools.cached_property
    def seconds_per_byte(self) -> float:
        """Of reading them from memory."""
        self.read()
        start = perf_counter()
        self.read()
        return (perf_counter() - start) / self.nbytes


def forget() -> None:
    """Let go of the memory for it."""
    _buffer.cache_clear()
