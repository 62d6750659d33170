"""What torch's CUDA allocator reserves from the device for a sequence of allocations: rounding, segments,
best fit, splits and merges.

Allocated bytes are what a plan's budget bounds. The allocator takes more from the device: segments of 2 MiB
for small blocks, of 20 MiB or more for large ones, which it keeps when they are free. How much more depends
on the order of sizes, so it is found by carrying the order out, in a model of
c10/cuda/CUDACachingAllocator.cpp (one stream; with expandable segments: expandable.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from effcompile.core.gpu import BLOCK, rounded

__all__ = [
    "LARGE_SEGMENT", "SMALL_SEGMENT", "Allocator", "Event", "Followed", "NoSegmentError", "Piece", "follow",
    "merged", "segment_bytes",
]  # fmt: skip

#: (name of a block, bytes): allocated; 0 bytes: freed.
Event = tuple[int, int]

#: Bytes of a segment of small blocks (up to 1 MiB), and of one of larger ones below 10 MiB.
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
_SMALL, _LARGE, _LARGE_STEP = 1 << 20, 10 << 20, 2 << 20


class NoSegmentError(Exception):
    """The device has no room for another segment, also when all that are wholly free were given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What an allocator is asked for, in all steps.

    Attributes:
        lasting: sizes of what is there before the first step: parameters, buffers, inputs, workspaces of
            libraries.
        step: what each asks for, by names from 0 on.
        left: sizes of what the first one leaves for good: the optimizer's states.
    """

    lasting: Sequence[int]
    step: Sequence[Event]
    left: Sequence[int] = ()


def follow(asked: Followed, made: Callable[[], Allocator] | None = None, steps: int = 3) -> Allocator:
    """The allocator after some steps, from which on it does not take much more.

    made: a fresh one, without a limit if none is given.

    Raises:
        NoSegmentError: on its device they cannot be carried out.
    """
    allocator = (made or Allocator)()
    for i, nbytes in enumerate(n for n in asked.lasting if n):
        allocator.allocate(-1 - i, nbytes)
    there = len(allocator._live)
    for turn in range(steps):
        allocator.run(asked.step)
        for i, nbytes in enumerate(n for n in asked.left if n and not turn):
            allocator.allocate(-1 - there - i, nbytes)
    return allocator


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of a segment, and its neighbours there; `mapped`: there is memory behind it."""

    size: int
    address: int
    small: bool
    free: bool = True
    mapped: bool = True
    before: Piece | None = None
    after: Piece | None = None


@dataclass(slots=True)
class Allocator:
    """The state after some events.

    Attributes:
        limit: bytes of the device; None: as many as are asked for.
        allocated: bytes given out, as the allocator counts them; `peak_allocated` at the most. reserved:
            taken from the device.
    """

    limit: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    _live: dict[int, Piece] = field(default_factory=dict)
    _free: dict[bool, list[tuple[int, int, Piece]]] = field(default_factory=lambda: {True: [], False: []})
    _next: int = 0

    def run(self, events: Iterable[Event]) -> Allocator:
        """Carry events out; returns itself."""
        for name, nbytes in events:
            if nbytes:
                self.allocate(name, nbytes)
            else:
                self.free(name)
        return self

    def allocate(self, name: int, nbytes: int) -> None:
        """Give out a block: the smallest free part that holds it, else a new segment; what is left over of it
        stays free.

        Raises:
            NoSegmentError: the device has no more.
        """
        size = max(BLOCK, rounded(nbytes))
        small = size <= _SMALL
        part = self._fitting(size, small) or self._more(size, small)
        if self._splits(part.size - size, small):
            self._put(self._cut(part, size))
        part.free = False
        self._live[name] = part
        self.allocated += part.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: int) -> None:
        """Take a block back, merged with free neighbours."""
        part = self._live.pop(name)
        self.allocated -= part.size
        for other in (part.before, part.after):
            if other is not None and other.free and other.mapped:
                self._take(other)
                part = merged(part, other)
        part.free = True
        self._put(part)

    def _fitting(self, size: int, small: bool) -> Piece | None:
        pool = self._free[small]
        at = bisect_left(pool, size, key=lambda entry: entry[0])
        return pool.pop(at)[2] if at < len(pool) else None

    def _splits(self, left: int, small: bool) -> bool:
        """Whether what is left of a part is one of its own."""
        return left >= BLOCK if small else left > _SMALL

    def _more(self, size: int, small: bool) -> Piece:
        """A part from the device, which is asked twice: the second time for what it was given back."""
        part = self._taken(size, small)
        if part is None:
            self._give_back()
            part = self._taken(size, small)
        if part is None:
            raise NoSegmentError
        return part

    def _taken(self, size: int, small: bool) -> Piece | None:
        """A new segment; None where the device has no room for one."""
        taken = segment_bytes(size, small)
        if self.limit is not None and self.reserved + taken > self.limit:
            return None
        part = Piece(size=taken, address=self._next, small=small)
        self._next += taken
        self.reserved += taken
        return part

    def _give_back(self) -> None:
        """All segments of which nothing is given out."""
        for small, pool in self._free.items():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[small] = [entry for entry in pool if entry not in whole]

    @staticmethod
    def _cut(part: Piece, size: int) -> Piece:
        """What is left of a part behind its first `size` bytes, as a part like it."""
        rest = replace(
            part, size=part.size - size, address=part.address + size, free=True, before=part, after=part.after
        )
        if part.after is not None:
            part.after.before = rest
        part.size, part.after = size, rest
        return rest

    def _put(self, part: Piece) -> None:
        insort(self._free[part.small], (part.size, part.address, part), key=lambda entry: entry[:2])

    def _take(self, part: Piece) -> None:
        pool = self._free[part.small]
        del pool[bisect_left(pool, (part.size, part.address), key=lambda entry: entry[:2])]


def segment_bytes(size: int, small: bool) -> int:
    """What is asked of the device where a block of `size` finds no room."""
    if small:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < _LARGE else -(-size // _LARGE_STEP) * _LARGE_STEP


def merged(part: Piece, other: Piece) -> Piece:
    """Two neighbours as one: the first of them."""
    first, second = (other, part) if part.before is other else (part, other)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
