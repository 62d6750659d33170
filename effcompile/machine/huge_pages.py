"""Weights in large pages of memory, where the system has them: a call reads all of them once, and every page
of 4 KiB costs a walk through the page table.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from effcompile.machine.memory import give_back

#: Bytes of a large page on x86 and, with pages of 4 KiB, on ARM.
PAGE = 1 << 21
#: Bytes of a weight from which on it is worth it.
_LEAST = 1 << 16
_LINE = 64


def move(weights: Iterable[object]) -> None:
    """Have those that are dense CPU tensors of bytes lie side by side in large pages, where they are large
    enough in all; whoever holds one of them holds it there.

    Linux makes such pages on request (`madvise`, unless they are switched off: the memory is then like any
    other). On an Intel with AMX the products of a BERT-base in 8 bits took half as long (85 MB of weights).
    """
    found = {id(weight): weight for weight in weights if _fits(weight)}.values()
    if not hasattr(mmap, "MADV_HUGEPAGE") or sum(weight.nbytes for weight in found) < PAGE:
        return
    places, end = [], 0
    for weight in found:
        places.append(end)
        end += -(-weight.nbytes // _LINE) * _LINE
    pages = mmap.mmap(-1, end + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % PAGE
    for weight, place in zip(found, places, strict=True):
        held = torch.frombuffer(pages, dtype=torch.uint8, offset=start + place, count=weight.nbytes)
        base = weight._base  # of one that was loaded: the same numbers in a row
        weight.data = held.view(weight.shape).copy_(weight)  # storages of their own: saved one by one
        if base is not None and base.nbytes == held.nbytes and base.is_contiguous():
            base.data = held.view(base.dtype).view(base.shape)
    give_back()  # where they were


def _fits(weight: object) -> TypeGuard[Tensor]:
    if not isinstance(weight, Tensor):
        return False
    plain = weight.device.type == "cpu" and weight.dtype is torch.uint8 and weight.is_contiguous()
    return plain and type(weight) in (Tensor, torch.nn.Parameter) and weight.nbytes >= _LEAST
