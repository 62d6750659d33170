"""Bytes written to and read from a file without the page cache.

In a virtual machine a page that is taken for the first time costs the host more than the disk takes for it:
0.2 to 0.4 GB/s into fresh pages of the cache, 2 to 3 past it (Firecracker, ext4). Nor does any become
resident.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

#: What a disk's blocks, and so all of a request, are aligned to.
ALIGNED = 4096
#: Bytes of one request, and those after which it is known how fast one of the ways is.
_AT_ONCE, _KNOWN = 8 << 20, 64 << 20


@dataclass(slots=True)
class _Way:
    """How fast one is, as far as it was gone."""

    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        self.bytes, self.seconds = self.bytes + size, self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class PastTheCache:
    """The way past the cache to an open file. Whoever calls gives offsets that are `ALIGNED`, and leaves what
    lies beyond the bytes until the next such offset to it.
    """

    def __init__(self, handle: int) -> None:
        """Of a file descriptor, which stays the caller's.

        Raises:
            OSError: this system, or the file's, has no such way.
        """
        if not hasattr(os, "O_DIRECT"):
            raise OSError("no way past the page cache here")
        self._handle = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT)
        self._room, self._lock = mmap.mmap(-1, _AT_ONCE), Lock()
        self._past, self._through = _Way(), _Way()

    @property
    def pays(self) -> bool:
        """Whether writing is faster so than through the cache, each of which is tried first."""
        if self._past.bytes < _KNOWN or self._through.bytes < _KNOWN:
            return self._past.bytes < _KNOWN
        return self._past.rate > self._through.rate

    def written_through(self, size: int, seconds: float) -> None:
        """So many bytes were written to the file the other way, in so many seconds."""
        self._through.add(size, seconds)

    def write(self, view: memoryview, at: int) -> None:
        """Write all of it.

        Raises:
            OSError: it could not be; nothing is said of what was.
        """
        with self._lock, memoryview(self._room) as room:
            began = perf_counter()
            for start in range(0, len(view), _AT_ONCE):
                piece = view[start : start + _AT_ONCE]
                room[: len(piece)] = piece
                with room[: _whole(len(piece))] as whole:
                    if os.pwrite(self._handle, whole, at + start) != len(whole):
                        raise OSError("part of a request was written")
            self._past.add(len(view), perf_counter() - began)

    def read(self, view: memoryview, at: int) -> None:
        """Fill it with what was written at this offset.

        Raises:
            OSError: it cannot be read.
        """
        with self._lock, memoryview(self._room) as room:
            for start in range(0, len(view), _AT_ONCE):
                piece = view[start : start + _AT_ONCE]
                with room[: _whole(len(piece))] as whole:
                    if os.preadv(self._handle, [whole], at + start) < len(piece):
                        raise OSError("part of a request was read")
                piece[:] = room[: len(piece)]

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)


def _whole(size: int) -> int:
    """The bytes of all blocks that so many lie in."""
    return -(-size // ALIGNED) * ALIGNED
