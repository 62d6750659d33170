"""Tensors put aside in a temporary file: no byte of them is resident, and one at a time is read back."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, overload

import torch
from torch import Tensor

from effcompile.machine.room import NoRoomError

_MOST_AT_ONCE = 1 << 30  # what one system call writes at the most
_LARGE = 4 << 20  # bytes of tensors from which on they are worth a file
_MAPPED = 1 << 18  # bytes of a tensor from which on its pages are worth a mapping


def put_aside(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors, read from a file whenever one is asked for; small ones, and those that lie on a
    device, as they are.
    """
    if sum(value.nbytes for value in values if value.device.type == "cpu") < _LARGE:
        return tuple(values)
    spool = Spool()
    for number, value in enumerate(values):
        spool.put(str(number), value)
    return _Aside(spool)


@dataclass(frozen=True, slots=True)
class _Aside(Sequence[Tensor]):
    """Tensors of a spool, by their numbers."""

    spool: Spool

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, at: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        value = self.spool[str(at % len(self))]
        assert value is not None
        return value

    def __len__(self) -> int:
        return len(self.spool)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies, and what it is."""

    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return _extent(self.size, self.stride) * self.dtype.itemsize

    def new(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")


class Spool(Mapping[str, Tensor | None]):
    """Tensors by name, each with its sizes and bits; None stays None. The file is unlinked as it is opened.

    Strides stay, but those of a tensor with gaps. What is no plain tensor (sparse ones, subclasses) is kept
    as it is.

    Args:
        folder: where the file lies; else where temporary ones do.
        behind: bytes that may wait, alive, for a thread that writes while others are made; 0: none waits. One
            that is changed while it waits is refused when it is read back, as autograd would refuse it.

    Attributes:
        seconds: that writing, or waiting for it, took in all.
    """

    def __init__(self, folder: str = "", *, behind: int = 0) -> None:
        # closed with the spool
        self._file = tempfile.TemporaryFile(dir=folder or None, prefix="effcompile-", buffering=0)  # noqa: SIM115
        self._end, self.seconds = 0, 0.0
        self._places: dict[str, _Place | Tensor | None] = {}
        self._queue = _Queue(behind) if behind > 0 else None

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return 0 if self._queue is None else self._queue.waiting

    def settle(self) -> None:
        """Wait until nothing waits. Raises as `put`."""
        if self._queue is not None:
            self._queue.drain(0)

    def close(self) -> None:
        """Nothing is read from it any more, and what waits is not written: a traceback may keep the spool
        alive.
        """
        if self._queue is not None:
            self._queue.close()
        self._file.close()

    def put(self, name: str, value: Tensor | None) -> None:
        """Put a tensor aside; one of the same name is replaced.

        Raises:
            NoRoomError: the disk is full, or was for one that waited.
        """
        if (
            value is None
            or type(value) not in (Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
        ):
            self._places[name] = value
            return
        plain = value.detach().resolve_conj().resolve_neg()  # what is written is what it says
        plain = plain.contiguous() if _extent(plain.shape, plain.stride()) > plain.numel() else plain
        place = _Place(
            self._place_of(name, plain), tuple(plain.shape), plain.stride(), plain.dtype, plain.device
        )
        plain = plain.cpu() if plain.device.type != "cpu" else plain
        began = perf_counter()
        if self._queue is None:
            _write(self._file, plain, place.at)
        else:
            self._queue.put(name, self._file, plain, place.at)
        self.seconds += perf_counter() - began
        self._places[name] = place

    def __getitem__(self, name: str) -> Tensor | None:
        place = self._written(name)
        if not isinstance(place, _Place):
            return place
        value = place.new()
        view = _memory(value)
        done = 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done : done + _MOST_AT_ONCE]], place.at + done)
        return value.to(place.device)

    def mapped(self, name: str) -> Tensor | None:
        """The tensor as pages of the file, not copied; its name is not put again meanwhile."""
        place = self._written(name)
        if not isinstance(place, _Place) or place.nbytes < _MAPPED:
            return self[name]
        pages = mmap.mmap(self._file.fileno(), place.nbytes, access=mmap.ACCESS_COPY, offset=place.at)
        flat = torch.frombuffer(pages, dtype=place.dtype)
        return flat.as_strided(place.size, place.stride).to(place.device)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # a mapping's own way is to read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _written(self, name: str) -> _Place | Tensor | None:
        """Where one lies, once it is there."""
        place = self._places[name]
        if self._queue is not None and isinstance(place, _Place):
            self._queue.check(name)
        return place

    def _place_of(self, name: str, value: Tensor) -> int:
        """Where it is written: over the one of the same name and size, else at the end."""
        before = self._places.get(name)
        if isinstance(before, _Place) and (before.size, before.stride, before.dtype) == (
            tuple(value.shape),
            value.stride(),
            value.dtype,
        ):
            return before.at
        at = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end = at + _extent(value.shape, value.stride()) * value.element_size()
        return at


class _File(Protocol):
    def fileno(self) -> int: ...


class _Queue:
    """Tensors on their way to a file, one after the other on a thread of its own, which ends with the queue.

    They are freed by the thread that put them: what watches an allocator sees that one alone.

    most: bytes that may wait; a larger one waits alone.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._thread = ThreadPoolExecutor(1, "effcompile-spool")
        self._last = dict[str, Future[bool]]()  # of each name: whether it was left alone until it was written
        self._pending = deque[tuple[Tensor, Future[bool]]]()

    @property
    def waiting(self) -> int:
        self._free()
        return self._bytes

    def put(self, name: str, file: _File, value: Tensor, at: int) -> None:
        """Have a tensor written, once there is place for it.

        Raises:
            NoRoomError: the disk was full for one before it.
        """
        self.drain(max(0, self._most - value.nbytes))
        self._last[name] = future = self._thread.submit(_left_alone, file, [value], at, _version(value))
        self._pending.append((value, future))
        self._bytes += value.nbytes

    def drain(self, most: int) -> None:
        """Wait until so many bytes wait at the most. Raises as `put`."""
        self._free()
        while self._bytes > most:
            self._pending[0][1].result()
            self._free()

    def check(self, name: str) -> None:
        """Wait for one.

        Raises:
            NoRoomError: the disk was full. RuntimeError: it was changed before it was written.
        """
        self._free()
        if name in self._last and not self._last[name].result():
            raise RuntimeError("a value that the backward needs was modified by an inplace operation")

    def close(self) -> None:
        """What waits is dropped, and the thread ends."""
        self._thread.shutdown(cancel_futures=True)
        self._pending.clear()

    def _free(self) -> None:
        """Let go of what is written. Raises NoRoomError where it could not be."""
        while self._pending and self._pending[0][1].done():
            value, future = self._pending.popleft()
            self._bytes -= value.nbytes
            future.result()


def _left_alone(file: _File, only: list[Tensor], at: int, version: int) -> bool:
    """Write it, taken out of the list; whether it still is what it was when it was put."""
    value = only.pop()
    _write(file, value, at)
    return _version(value) == version


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _write(file: _File, value: Tensor, at: int) -> None:
    """Raises NoRoomError where the disk is full."""
    view, done = _memory(value), 0
    try:
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done : done + _MOST_AT_ONCE], at + done)
    except OSError as error:
        raise NoRoomError(
            f"{tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a folder with more room"
        ) from error


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last; fewer than it has where it is expanded."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _memory(value: Tensor) -> memoryview:
    """The bytes of a tensor whose memory has no gaps."""
    flat = value.as_strided((_extent(value.shape, value.stride()),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
