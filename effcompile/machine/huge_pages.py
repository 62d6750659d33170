"""Weights in large pages of memory, where the system has them: a call reads all of them once, and every page
of 4 KiB costs a walk through the page table.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
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
#: How weights of two bytes end that were packed for products: sixteen outputs of a pair of columns.
_PAIRS = (16, 2)
#: Linux's number of the request, since 6.1.
_COLLAPSE = 25


def move(weights: Iterable[object]) -> None:
    """Have those that are dense CPU tensors of bytes, or of two bytes as our kernels read them, lie side by
    side in large pages, where they are large enough in all; whoever holds one of them holds it there.

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
        weight.data = (
            held.view(weight.dtype).view(weight.shape).copy_(weight)
        )  # storages of their own: saved one by one
        if base is not None and base.nbytes == held.nbytes and base.is_contiguous():
            base.data = held.view(base.dtype).view(base.shape)
    give_back()  # where they were


def collapse(weights: Iterable[Tensor]) -> None:
    """Have weights lie in large pages where they are, as far as Linux can: no address changes, and none is
    copied by us.

    Weights that lie side by side share pages. One row times a matrix of 131 MB in fp32 read 31 GB/s so where
    it had read 21 (an EPYC with Zen 4, one core).
    """
    if sys.platform != "linux":
        return
    dense = [each for each in weights if each.device.type == "cpu" and each.is_contiguous()]
    spans = list[list[int]]()
    for start, end in sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in dense):
        if spans and start - spans[-1][1] < _LEAST:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    ask = ctypes.CDLL(None).madvise
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in spans:
        for page in range(-(-start // PAGE) * PAGE, end - PAGE + 1, PAGE):
            ask(page, PAGE, _COLLAPSE)  # refused, it stays as it is


def _fits(weight: object) -> TypeGuard[Tensor]:
    if not isinstance(weight, Tensor):
        return False
    packed = weight.dim() == 4 and weight.shape[2:] == _PAIRS and weight.dtype.itemsize == 2
    plain = weight.device.type == "cpu" and weight.is_contiguous() and (weight.dtype is torch.uint8 or packed)
    return plain and type(weight) in (Tensor, torch.nn.Parameter) and weight.nbytes >= _LEAST
