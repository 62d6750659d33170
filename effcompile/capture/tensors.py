"""Whether tensors hold what they held: by their object, autograd's count of changes in place, their address,
and samples of their bytes.

A change under no_grad (an optimizer's step, load_state_dict) is counted in `_version`; one of `p.data` in
place is not: the samples see it. They cover small models whole; of large ones the first, the middle and the
last bytes of every tensor, which a write to all of it changes. A write through `p.data` to some rows alone
may miss them: `Checksums` go over all bytes, a share at each call.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import nn

from effcompile.core import torch_compat

#: Bytes that all samples together may have: they are read and compared at each call.
_SAMPLED = 32 << 10
#: Of one tensor no more than this many bytes are sampled, and no less than the other.
_MOST, _LEAST = 4 << 10, 24
#: Of all bytes this share is summed at each call, and no less than so many: a call reads most weights once
#: anyway.
_SHARE, _LEAST_SUMMED = 2048, 8 << 10
#: What is compared among processes is looked at in so many pieces, one at each call.
_PIECES = 256
_version = attrgetter("_version")
_Bytes = ctypes.Array[ctypes.c_char]


class Watched:
    """A list of tensors with what tells, in microseconds, that one of them was changed."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._counted = [t for t in tensors if not t.is_inference()]
        self._addressed = [t for t in tensors if _has_address(t)]
        share = _share(len(self._addressed))
        self._samples = [part for t in self._addressed for part in _sampled(t, share)]
        self._versions = list(map(_version, self._counted))
        self._addresses = list(map(torch.Tensor.data_ptr, self._addressed))
        self._bytes = b"".join(self._samples)

    def unchanged(self) -> bool:
        """Whether all are as they were.

        The addresses come first: a sample is read where its tensor still is.
        """
        return (
            list(map(_version, self._counted)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._addressed)) == self._addresses
            and b"".join(self._samples) == self._bytes
        )


class Checksums:
    """CRC-32 of all bytes of tensors that are too large to be sampled whole, taken piece by piece over many
    calls.

    Only to be asked where `Watched` says that every tensor is where it was.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sampled = _share(sum(map(_has_address, tensors)))
        addressed = [
            t
            for t in tensors
            if _has_address(t) and t.device.type == "cpu" and t.numel() and _extent(t) > sampled
        ]
        self.tensors = tuple(tensors)
        self._step = max(_LEAST_SUMMED, sum(map(_extent, addressed)) // _SHARE)
        parts = [(t, part) for t in addressed for part in _pieces(t, self._step)]
        self._of = [t for t, _ in parts]
        self._parts: list[_Bytes] = [part for _, part in parts]
        self._sums = list(map(zlib.crc32, self._parts))
        self._turns = self._divided()
        self._turn = 0

    @property
    def calls(self) -> int:
        """After so many calls all bytes were looked at; 0 where the samples have them all."""
        return len(self._turns)

    def changed(self) -> torch.Tensor | None:
        """The tensor that was changed among those whose turn it is.

        As long as there is one, its turn goes on.
        """
        if not self._turns:
            return None
        first, last = self._turns[self._turn]
        found = self._changed(first, last)
        if found is None:
            self._turn = (self._turn + 1) % len(self._turns)
        return found

    def changed_anywhere(self) -> torch.Tensor | None:
        """The first tensor that was changed."""
        return self._changed(0, len(self._parts))

    def _changed(self, first: int, last: int) -> torch.Tensor | None:
        if list(map(zlib.crc32, self._parts[first:last])) == self._sums[first:last]:
            return None
        return next(self._of[i] for i in range(first, last) if zlib.crc32(self._parts[i]) != self._sums[i])

    def _divided(self) -> list[tuple[int, int]]:
        """Parts in a row, each time of about as many bytes."""
        turns, first, nbytes = [], 0, 0
        for at, part in enumerate(self._parts, start=1):
            nbytes += len(part)
            if nbytes >= self._step or at == len(self._parts):
                turns.append((first, at))
                first, nbytes = at, 0
        return turns


class Digest:
    """A number that is equal where copies of tensors, in several processes, have equal bytes.

    Each time the samples of all of them are looked at, and one further piece of all bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        dense = [t for t in tensors if t.numel() and _has_address(t) and _is_dense(t)]
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._elsewhere = [t for t in dense if t.device.type != "cpu"]
        here, share = [t for t in dense if t.device.type == "cpu"], _share(len(dense))
        self._samples = [part for t in here for part in _sampled(t, share)]
        large = [t for t in here if _extent(t) > share]
        step = max(_LEAST_SUMMED, sum(map(_extent, large)) // _PIECES)
        self._pieces = [piece for t in large for piece in _pieces(t, step)]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are still where they were."""
        return list(map(torch.Tensor.data_ptr, tensors)) == self._addresses

    def at(self, call: int) -> int:
        """The number at the `call`-th time; of what is on an accelerator the exact sum of all bytes, which
        waits for it.
        """
        found = zlib.crc32(b"".join(self._samples))
        if self._pieces:
            found = zlib.crc32(self._pieces[call % len(self._pieces)], found)
        return found + sum(_sum_of_bytes(tensor) for tensor in self._elsewhere)


def bytes_of(tensor: torch.Tensor) -> int:
    """A number of all its bytes, as they follow each other where it is contiguous."""
    whole = tensor.detach().contiguous()
    if whole.device.type != "cpu":
        return _sum_of_bytes(whole)
    return zlib.crc32(_at(whole, 0, _extent(whole))) if whole.numel() else 0


def _sum_of_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))


def _is_dense(tensor: torch.Tensor) -> bool:
    return _extent(tensor) == tensor.numel() * tensor.element_size()


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


def _share(count: int) -> int:
    """Bytes of each of so many tensors that are sampled."""
    return min(_MOST, max(_LEAST, _SAMPLED // max(1, count)))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.element_size()


def _at(tensor: torch.Tensor, start: int, nbytes: int) -> _Bytes:
    """Its memory where it is read."""
    return (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)


def _pieces(tensor: torch.Tensor, step: int) -> Iterator[_Bytes]:
    extent = _extent(tensor)
    return (_at(tensor, start, min(step, extent - start)) for start in range(0, extent, step))


def _sampled(tensor: torch.Tensor, share: int) -> Iterator[_Bytes]:
    """The tensor's memory: all of it, or three parts that together have `share` bytes."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    extent = _extent(tensor)
    part = share // 3
    starts = (0, (extent - part) // 2, extent - part) if extent > share else (0,)
    for start in starts:
        yield _at(tensor, start, part if extent > share else extent)
