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


_BARE = "bare"
_END = 1 << 60


class FakeExpandable:
    """The same with `expandable_segments:True`: one list of [bytes, name, None if free, or "bare"] per pool.

    A pool's addresses do not end. What finds no room takes the first run of free and bare blocks that is long
    enough and has memory put behind it, in units of 2 MiB (small) or 20 MiB. A free block before a bare one
    counts, where the smallest is looked for, with both sizes. What is left of a block is always one of its
    own. Whole units of free blocks go back to the device. A process's cap is asked for a whole segment.
    """

    def __init__(self, size: int, *, capped: bool) -> None:
        self.size, self.capped = size, capped
        self.pools: dict[bool, list[_Block]] = {True: [[_END, _BARE]], False: [[_END, _BARE]]}

    @property
    def reserved(self) -> int:
        return sum(n for blocks in self.pools.values() for n, name in blocks if name != _BARE)

    @property
    def allocated(self) -> int:
        return sum(n for blocks in self.pools.values() for n, name in blocks if isinstance(name, int))

    run = FakeGpu.run

    def allocate(self, name: int, nbytes: int) -> None:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= _MIB
        at = self._smallest(size, small)
        if at is None:
            at = self._grown(size, small)
        if at is None:
            self._shrink()
            at = self._grown(size, small)
        if at is None:
            raise OutOfMemoryError
        blocks = self.pools[small]
        left = blocks[at][0] - size
        blocks[at : at + 1] = [[size, name], *([[left, None]] if left else [])]

    def free(self, name: int) -> None:
        for blocks in self.pools.values():
            for block in blocks:
                if block[1] == name:
                    block[1] = None
        self._tidy()

    def _tidy(self) -> None:
        for small, blocks in self.pools.items():
            made: list[_Block] = []
            for n, name in blocks:
                if made and name == made[-1][1] and not isinstance(name, int):
                    made[-1][0] += n
                else:
                    made.append([n, name])
            self.pools[small] = made

    def _smallest(self, size: int, small: bool) -> int | None:
        blocks = self.pools[small]
        found = sorted((b[0], at) for at, b in enumerate(blocks) if b[1] is None and b[0] >= size)
        if not found:
            return None
        after = [n if name == _BARE else 0 for n, name in blocks[1:]] + [0]
        best = found[0]
        for other in found[1:]:
            if other[0] + after[other[1]] >= best[0] + after[best[1]]:
                break
            best = other
        return best[1]

    def _grown(self, size: int, small: bool) -> int | None:
        unit = 2 * _MIB if small else 20 * _MIB
        segment = unit if small or size < 10 * _MIB else (size + 2 * _MIB - 1) // (2 * _MIB) * 2 * _MIB
        if self.capped and self.reserved + segment > self.size:
            return None
        start = self._first_run(size, small)
        while self.pools[small][start][1] == _BARE or self.pools[small][start][0] < size:
            blocks = self.pools[small]
            bare = start if blocks[start][1] == _BARE else start + 1
            lacking = size - (0 if bare == start else blocks[start][0])
            lacking = min(lacking, blocks[bare][0])
            taken = (lacking + unit - 1) // unit * unit
            if not self.capped and self.reserved + taken > self.size:
                return None
            address = sum(n for n, _ in blocks[:start])
            left = blocks[bare][0] - taken
            blocks[bare : bare + 1] = [[taken, None], *([[left, _BARE]] if left else [])]
            self._tidy()
            start = self._at(small, address)
        return start

    def _first_run(self, size: int, small: bool) -> int:
        blocks = self.pools[small]
        for at, block in enumerate(blocks):
            if block[1] == _BARE:
                first = at - 1 if at and blocks[at - 1][1] is None else at
                length = 0
                for n, name in blocks[first:]:
                    if isinstance(name, int) or length >= size:
                        break
                    length += n
                if length >= size:
                    return first
        raise AssertionError

    def _at(self, small: bool, address: int) -> int:
        start = 0
        for at, (n, _) in enumerate(self.pools[small]):
            if start <= address < start + n:
                return at
            start += n
        raise AssertionError

    def _shrink(self) -> None:
        for small, blocks in self.pools.items():
            unit, start, made = 2 * _MIB if small else 20 * _MIB, 0, list[_Block]()
            for n, name in blocks:
                low, high = (start + unit - 1) // unit * unit, (start + n) // unit * unit
                if name is None and low < high:
                    parts = [[low - start, None], [high - low, _BARE], [start + n - high, None]]
                    made += [part for part in parts if part[0]]
                else:
                    made.append([n, name])
                start += n
            self.pools[small] = made
        self._tidy()
