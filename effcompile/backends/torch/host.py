"""Memory of the host, outside torch's allocator: pinned where there is a GPU, else in the host pool's file
(ops/offload.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from effcompile.ops.offload import host_pool

_ALIGNED = 64


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors' values in the host's memory.

    Without a GPU in one region for all, given back with the last of the copies.
    """
    if torch.cuda.is_available():
        return [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) for t in tensors]
    pool, size = host_pool(), sum(_room(t) for t in tensors)
    region, _ = pool.take(size)
    copies, at = [], 0
    for t in tensors:
        copies.append(region[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t))
        at += _room(t)
    weakref.finalize(
        region.untyped_storage(),
        pool.give_back,
        torch.frombuffer(pool.mapped[region.data_ptr()], dtype=torch.uint8),
        size,
    )
    return copies


def rest(tensors: Sequence[torch.Tensor]) -> None:
    """Copies that `host_copies` made leave the resident memory until they are read: the pool's
    file has them.
    """
    for address in {t.untyped_storage().data_ptr() for t in tensors if t.device.type == "cpu"}:
        host_pool().rest(address)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
