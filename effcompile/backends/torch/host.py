"""Memory of the host, outside torch's allocator: pinned where there is a GPU, else anonymous pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

_ALIGNED = 64


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors' values in the host's memory. Without a GPU in one region for all, given back with the last of the copies."""
    if torch.cuda.is_available():
        return [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) for t in tensors]
    size = sum(_room(t) for t in tensors)
    pages = mmap.mmap(-1, max(size, 1))
    copies, at = [], 0
    for t in tensors:
        flat = torch.frombuffer(pages, dtype=t.dtype, count=t.numel(), offset=at) if t.numel() else torch.empty(0, dtype=t.dtype)
        copies.append(flat.view(t.shape).copy_(t))
        at += _room(t)
    return copies


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
