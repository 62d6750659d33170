"""A GPU of a given size under torch's caching allocator, written from its description and not from ours, byte
by byte and slowly.

c10/cuda/CUDACachingAllocator.cpp as of torch 2.11, one stream, no option set: requests are rounded to 512 B;
up to 1 MiB they come from segments of 2 MiB, below 10 MiB of 20 MiB, above of their size in steps of 2 MiB;
the smallest free block that holds them is taken, at the lowest address; what is left of it is a block of its
own from 512 B (small) or above 1 MiB (large); freed neighbours are merged. Where the device gives no more,
all segments that are wholly free go back to it, and it is asked once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MIB = 1 << 20
#: [bytes, name or None].
_Block = list[Any]


class OutOfMemoryError(Exception):
    """The device has no room for another segment."""


class FakeGpu:
    """Segments are lists of [bytes, name]; a name of None is free."""

    def __init__(self, size: int) -> None:
        self.size, self.asked_twice = size, 0
        self.segments: list[tuple[bool, int, list[_Block]]] = []
        self._where: dict[int, list[_Block]] = {}
        self._serial = 0

    @property
    def reserved(self) -> int:
        return sum(nbytes for _, _, blocks in self.segments for nbytes, _ in blocks)

    @property
    def allocated(self) -> int:
        return sum(nbytes for _, _, blocks in self.segments for nbytes, name in blocks if name is not None)

    def run(self, events: Iterable[tuple[int, int]]) -> FakeGpu:
        for name, nbytes in events:
            if nbytes:
                self.allocate(name, nbytes)
            else:
                self.free(name)
        return self

    def allocate(self, name: int, nbytes: int) -> None:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= _MIB
        places = [
            (block[0], serial, at, blocks)
            for kind, serial, blocks in self.segments if kind == small
            for at, block in enumerate(blocks) if block[1] is None and block[0] >= size
        ]  # fmt: skip
        if not places:
            blocks = self._segment(
                2 * _MIB
                if small
                else 20 * _MIB
                if size < 10 * _MIB
                else (size + 2 * _MIB - 1) // (2 * _MIB) * 2 * _MIB,
                small,
            )
            places = [(blocks[0][0], self._serial, 0, blocks)]
        found, _, at, blocks = min(places, key=lambda place: place[:3])
        left = found - size
        if left >= 512 if small else left > _MIB:
            blocks[at : at + 1] = [[size, name], [left, None]]
        else:
            blocks[at][1] = name
        self._where[name] = blocks

    def free(self, name: int) -> None:
        blocks = self._where.pop(name)
        at = next(at for at, block in enumerate(blocks) if block[1] == name)
        blocks[at][1] = None
        for first in (at, at - 1):
            if 0 <= first < len(blocks) - 1 and blocks[first][1] is None and blocks[first + 1][1] is None:
                blocks[first : first + 2] = [[blocks[first][0] + blocks[first + 1][0], None]]

    def _segment(self, nbytes: int, small: bool) -> list[_Block]:
        if self.reserved + nbytes > self.size:
            self.asked_twice += 1
            self.segments = [
                segment for segment in self.segments if len(segment[2]) > 1 or segment[2][0][1] is not None
            ]
            if self.reserved + nbytes > self.size:
                raise OutOfMemoryError
        self._serial += 1
        blocks: list[_Block] = [[nbytes, None]]
        self.segments.append((small, self._serial, blocks))
        return blocks
