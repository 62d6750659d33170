"""Linears of few rows, whose time is that of reading their weights: timed on weights that no cache holds.

In a model the other layers have pushed them out. As many copies in turn as were thought to exceed the caches
were read at 60 to 76 GB/s in a virtual machine that says it has 32 MiB of last level, whose memory gives 24.
"""

from __future__ import annotations

import functools

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


def reads_weights(call: KernelCall) -> bool:
    """Whether it is such a linear."""
    dense = call.kernel.startswith("linear/") and call.format is not None
    return dense and call.dims[0] <= FEW_ROWS and call.dims[1] * call.dims[2] >= _LEAST


def cold_copies(nbytes: int) -> int:
    """Linears of so many bytes in a row, after the caches were emptied: enough that starting is little."""
    return max(1, min(_MOST_COPIES, _ENOUGH // nbytes))


@functools.cache
def _buffer() -> Tensor:
    return torch.ones(_BYTES // 4, device="cpu")


def evict() -> None:
    """Read so much that nothing else is left in the processor's caches."""
    _buffer().sum()


def forget() -> None:
    """Let go of the memory for it."""
    _buffer.cache_clear()
