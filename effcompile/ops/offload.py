"""Values on the host between forward and backward: a pool outside torch's allocator, and the copies to it and
back.

Plain functions, not custom operators: they stand as call_function nodes in graphs that our own executor runs,
and what they hand over is a `Slot`, which gives its bytes back when it is fetched or when nobody holds it any
more (a loss whose backward is never called). A copy keeps sizes, strides and bits.

On the CPU a slot is a part of a temporary file, unlinked as it is opened, so that a killed process leaves
nothing behind, and mapped into memory: the system writes it to the disk of `folder` when memory runs short.
For CUDA a slot is pinned memory; `send`, `sent`, `ask`, `arrived` copy on side streams beside the compute,
`offload` and `fetch` wait.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from effcompile.core import gpu
from effcompile.core.errors import UsageError

__all__ = [
    "Coming",
    "HostPool",
    "Slot",
    "arrived",
    "ask",
    "fetch",
    "host_pool",
    "is_dense",
    "link_seconds",
    "offload",
    "send",
    "sent",
]

_PAGE = mmap.ALLOCATIONGRANULARITY
_PROBE_BYTES = 16 << 20


class HostPool:
    """Host memory in slots; a slot that was given back is used again for one of the same size.

    Attributes:
        in_use: bytes of all slots that are taken. peak: the most there ever were; `reset_peak` begins anew.
    """

    def __init__(self, folder: str) -> None:
        self.fd = -1
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="effcompile-") as file:
                self.fd = os.dup(file.fileno())
        except OSError as error:
            raise UsageError(
                f"No host pool can be made in {folder}: {error.strerror}. Give another offload.folder."
            ) from error
        self.folder = folder
        self.size = self.in_use = self.peak = 0
        self.free: dict[tuple[int, bool], list[tuple[Tensor, Any]]] = {}
        self.mapped: dict[int, mmap.mmap] = {}  # by address

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # what is mapped stays until nobody holds it

    def take(self, nbytes: int, *, pinned: bool = False) -> tuple[Tensor, Any]:
        """Memory of `nbytes` bytes, uint8, and the CUDA event after which it may be written, or None.

        Raises:
            UsageError: the folder's disk is full.
        """
        pages = max(1, -(-nbytes // _PAGE)) * _PAGE
        left = self.free.get((pages, pinned))
        found = left.pop() if left else (self._pinned(pages) if pinned else self._mapped(pages), None)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        return found

    def give_back(self, memory: Tensor, nbytes: int, *, pinned: bool = False, event: object = None) -> None:
        """The memory may be taken again; what writes it then must wait for the event."""
        self.in_use -= nbytes
        self.free.setdefault((memory.numel(), pinned), []).append((memory, event))

    def reset_peak(self) -> None:
        """Forget what was in use at the highest before."""
        self.peak = self.in_use

    def _pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _mapped(self, nbytes: int) -> Tensor:
        try:
            os.posix_fallocate(self.fd, self.size, nbytes)  # a full disk is an error here, not a signal later
        except OSError as error:
            raise UsageError(
                f"The host pool in {self.folder} cannot grow from {self.size} by {nbytes} bytes: {error}. "
                "Give offload.folder on a disk with more room, or a smaller offload.host."
            ) from error
        mapped = mmap.mmap(self.fd, nbytes, offset=self.size)
        self.size += nbytes
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.mapped[memory.data_ptr()] = mapped
        return memory

    def rest(self, address: int) -> None:
        """Memory that `take` returned leaves the process's resident pages: the file has its values, and
        reading brings them back.
        """
        mapped = self.mapped.get(address)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def host_pool(folder: str = "") -> HostPool:
    """The pool of this process in a folder; "" is the system's for temporary files."""
    return _pool(folder or tempfile.gettempdir())


_pool = cache(HostPool)


class Slot:
    """One value on the host, with what it takes to make it again."""

    def __init__(self, x: Tensor, pool: HostPool) -> None:
        self.pool, self.nbytes = pool, x.numel() * x.element_size()
        self.size, self.stride, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device
        self.memory: Tensor | None
        self.memory, self.event = pool.take(self.nbytes, pinned=x.is_cuda)

    @property
    def bytes(self) -> Tensor:
        """Its memory."""
        assert self.memory is not None, "a slot is fetched once"
        return self.memory[: self.nbytes]

    def new(self) -> Tensor:
        """A tensor for the value, still empty."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def rest(self) -> None:
        """Until it is read it is no resident memory."""
        if self.memory is not None:
            self.pool.rest(self.memory.data_ptr())

    def release(self) -> None:
        """Give the bytes back."""
        self.rest()
        memory, self.memory = self.memory, None
        if memory is not None:
            self.pool.give_back(memory, self.nbytes, pinned=self.device.type == "cuda", event=self.event)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self.release()


@dataclass(frozen=True, slots=True)
class Coming:
    """A value on its way to the device."""

    value: Tensor
    slot: Slot


def offload(x: Tensor, folder: str = "") -> Slot:
    """Copy a value to the host, and wait for it."""
    x = _dense(x)
    slot = Slot(x, host_pool(folder))
    if slot.event is not None:
        slot.event.synchronize()
    slot.bytes.copy_(_bytes(x))
    slot.rest()
    return slot


def fetch(slot: Slot) -> Tensor:
    """The value again, as it was; its slot is given back."""
    value = slot.new()
    _bytes(value).copy_(slot.bytes)
    slot.release()
    return value


def send(x: Tensor, folder: str = "") -> Slot:
    """Begin to copy a value to the host, beside what runs on; `sent` must follow before the value
    is freed.
    """
    if not x.is_cuda:
        return offload(x, folder)
    x = _dense(x)
    slot, side = Slot(x, host_pool(folder)), _side_stream(x.device.index or 0, "out")
    side.wait_stream(torch.cuda.current_stream(x.device))
    if slot.event is not None:
        side.wait_event(slot.event)
    with torch.cuda.stream(side):
        slot.bytes.copy_(_bytes(x), non_blocking=True)
        slot.event = side.record_event()
    return slot


def sent(slot: Slot, x: Tensor) -> Slot:
    """What runs from here on waits for the copy of x that `send` began."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_event(slot.event)
    return slot


def ask(slot: Slot) -> Coming:
    """Begin to copy a value back."""
    if slot.device.type != "cuda":
        return Coming(fetch(slot), slot)
    value, side = slot.new(), _side_stream(slot.device.index or 0, "back")
    side.wait_stream(torch.cuda.current_stream(slot.device))
    with torch.cuda.stream(side):
        _bytes(value).copy_(slot.bytes, non_blocking=True)
        slot.event = side.record_event()
    return Coming(value, slot)


def arrived(coming: Coming) -> Tensor:
    """The value; what runs from here on waits for its copy. Its slot is given back."""
    if coming.value.is_cuda:
        torch.cuda.current_stream(coming.value.device).wait_event(coming.slot.event)
    coming.slot.release()
    return coming.value


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill its memory, each place once, in whatever order of axes."""
    expected = 1
    for step, length in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


def link_seconds(folder: str = "", device: str = "cpu") -> tuple[float, float]:
    """Seconds per byte to the host and back, measured with one value of 16 MiB (the faster of two runs); on a
    GPU of 64 MiB.
    """
    if device == "cuda":
        return _device_link_seconds()
    x = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(2):
        start = perf_counter()
        slot = offload(x, folder)
        middle = perf_counter()
        fetch(slot)
        times.append((middle - start, perf_counter() - middle))
    out, back = map(min, zip(*times, strict=True))
    return out / _PROBE_BYTES, back / _PROBE_BYTES


def _device_link_seconds() -> tuple[float, float]:
    """The same of pinned memory and the current GPU, by its own clock: pages are pinned once, and are the
    pool's from then on.
    """
    size = 4 * _PROBE_BYTES
    x, host = (
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
    )
    out, back = (
        gpu.seconds(partial(to.copy_, of, non_blocking=True), cold=False) for to, of in ((host, x), (x, host))
    )
    return out / size, back / size


def _dense(x: Tensor) -> Tensor:
    return x if is_dense(tuple(x.shape), x.stride()) else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    """A dense tensor's memory."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@cache
def _side_stream(device: int, direction: str) -> Any:
    return torch.cuda.Stream(device)
