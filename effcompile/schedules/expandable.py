"""torch's CUDA allocator with `expandable_segments:True`: a pool is one range of addresses, behind which
memory is put in units where it ends, and where some was given back.

As `reserved.Allocator`, of the functions find_expandable_block, map_block, unmap_block and get_free_block in
c10/cuda/CUDACachingAllocator.cpp (one stream). A range of addresses is an eighth longer than the device's
memory; here it has no end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from effcompile.core.gpu import BLOCK
from effcompile.schedules.reserved import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    Allocator,
    Piece,
    merged,
    segment_bytes,
)

__all__ = ["Expandable"]

#: Bytes of a range of addresses that never ends.
_ENDLESS = 1 << 60


@dataclass(slots=True)
class Expandable(Allocator):
    """The state after some events.

    Attributes:
        capped: the limit is a process's own (`torch.cuda.set_per_process_memory_fraction`), which is asked
            for a whole segment however few units are lacking; else the device's, which is asked for units.
    """

    capped: bool = False
    _bare: dict[bool, list[tuple[int, Piece]]] = field(default_factory=dict)

    def _splits(self, left: int, small: bool) -> bool:
        return left >= BLOCK

    def _fitting(self, size: int, small: bool) -> Piece | None:
        """The smallest, where what can grow counts with what it can grow to."""
        pool = self._free[small]
        at = bisect_left(pool, size, key=lambda entry: entry[0])
        if at == len(pool):
            return None
        while at + 1 < len(pool) and _grown(pool[at + 1][2]) < _grown(pool[at][2]):
            at += 1
        return pool.pop(at)[2]

    def _taken(self, size: int, small: bool) -> Piece | None:
        """Free and bare parts side by side, from the first address where they are long enough, with memory
        behind as much of it as is asked for; None where the limit leaves none.
        """
        asked = self.reserved + segment_bytes(size, small)
        if self.capped and self.limit is not None and asked > self.limit:
            return None
        part = self._place(size, small)
        if not part.mapped:
            found = self._mapped(part, min(part.size, size))
            if found is None:
                return None
            part = found
        while part.size < size:
            beside = part.after
            assert beside is not None and not beside.mapped
            found = self._mapped(beside, min(size - part.size, beside.size))
            if found is None:
                return None
            part = found
        self._take(part)
        return part

    def _place(self, size: int, small: bool) -> Piece:
        for _, bare in self._bare.setdefault(small, []):
            before = bare.before
            first = before if before is not None and before.free else bare
            length, part = 0, first
            while length < size and part.free:
                length += part.size
                if part.after is None:
                    break
                part = part.after
            if length >= size:
                return first
        endless = Piece(size=_ENDLESS, address=0, small=small, mapped=False)
        self._bare[small].append((0, endless))
        return endless

    def _mapped(self, part: Piece, size: int) -> Piece | None:
        """A bare part with memory behind its first `size` bytes, in whole units, merged with free neighbours;
        None where there is none left.
        """
        unit = SMALL_SEGMENT if part.small else LARGE_SEGMENT
        taken = -(-size // unit) * unit
        if not self.capped and self.limit is not None and self.reserved + taken > self.limit:
            return None
        self._forget(part)
        if taken < part.size:
            self._lay_bare(self._cut(part, taken))
        part.mapped = True
        self.reserved += taken
        for other in (part.before, part.after):
            if other is not None and other.free and other.mapped:
                self._take(other)
                part = merged(part, other)
        self._put(part)
        return part

    def _give_back(self) -> None:
        """All whole units of free parts, of large blocks first."""
        for small in (False, True):
            unit = SMALL_SEGMENT if small else LARGE_SEGMENT
            for _, _, part in list(self._free[small]):
                start = -(-part.address // unit) * unit
                end = (part.address + part.size) // unit * unit
                if start < end:
                    self._unmap(part, start, end)

    def _unmap(self, part: Piece, start: int, end: int) -> None:
        """Take the memory from addresses `start` to `end` of a free part."""
        self._take(part)
        if part.address < start:
            rest = self._cut(part, start - part.address)
            self._put(part)
            part = rest
        if part.size > end - start:
            self._put(self._cut(part, end - start))
        part.mapped = False
        self.reserved -= part.size
        for other in (part.before, part.after):
            if other is not None and not other.mapped:
                self._forget(other)
                part = merged(part, other)
        self._lay_bare(part)

    def _lay_bare(self, part: Piece) -> None:
        insort(self._bare[part.small], (part.address, part), key=lambda entry: entry[0])

    def _forget(self, part: Piece) -> None:
        bare = self._bare[part.small]
        del bare[bisect_left(bare, part.address, key=lambda entry: entry[0])]


def _grown(part: Piece) -> int:
    """Bytes of a free part with the bare one behind it."""
    return part.size + (part.after.size if part.after is not None and not part.after.mapped else 0)
