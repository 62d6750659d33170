"""Tensors put aside in a temporary file: no byte of them is resident, and one at a time is read back."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import overload

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

    Attributes:
        seconds: that writing took, in all.
    """

    def __init__(self, folder: str = "") -> None:
        # closed with the spool
        self._file = tempfile.TemporaryFile(dir=folder or None, prefix="effcompile-", buffering=0)  # noqa: SIM115
        self._end, self.seconds = 0, 0.0
        self._places: dict[str, _Place | Tensor | None] = {}

    def put(self, name: str, value: Tensor | None) -> None:
        """Put a tensor aside; one of the same name is replaced.

        Raises:
            NoRoomError: the disk is full.
        """
        if (
            value is None
            or type(value) not in (Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
        ):
            self._places[name] = value
            return
        plain = value.detach()
        plain = plain.contiguous() if _extent(plain.shape, plain.stride()) > plain.numel() else plain
        place = _Place(
            self._place_of(name, plain), tuple(plain.shape), plain.stride(), plain.dtype, plain.device
        )
        view = _memory(plain.cpu() if plain.device.type != "cpu" else plain)
        began = perf_counter()
        try:
            for start in range(0, len(view), _MOST_AT_ONCE):
                self._write(view[start : start + _MOST_AT_ONCE], place.at + start)
        except OSError as error:
            raise NoRoomError(
                f"{tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a folder with more room"
            ) from error
        self.seconds += perf_counter() - began
        self._places[name] = place

    def __getitem__(self, name: str) -> Tensor | None:
        place = self._places[name]
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
        place = self._places[name]
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

    def _write(self, view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], at + done)


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last; fewer than it has where it is expanded."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _memory(value: Tensor) -> memoryview:
    """The bytes of a tensor whose memory has no gaps."""
    flat = value.as_strided((_extent(value.shape, value.stride()),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
