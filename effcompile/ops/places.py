"""Places in memory for tensors of which it is known when each is made and last read, found greedily
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effcompile.core.types import Shape
from effcompile.ops.instruction_sets import LINE

__all__ = ["Life", "Places", "dense_strides", "placed", "places_for"]

#: Times the most that lives at once that places may take in all.
_ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Life:
    """Bytes that are held from one step to another, both included."""

    nbytes: int
    first: int
    last: int

    @property
    def room(self) -> int:
        return -(-self.nbytes // LINE) * LINE

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


#: Value, or scratch → its memory, and bytes from its beginning.
Places = dict[int, tuple[int, int]]


def places_for(lives: dict[int, Life], fixed: dict[int, int], workspace: int) -> tuple[Places, int] | None:
    """A place for each, and the bytes of the workspace, the memory of that number; None where all that takes
    too much. The best of what some orders give: the largest first, what is made before scratch, what stays
    longest, as they come.
    """
    own = {fixed[at]: lives[at].nbytes for at in fixed if at in lives}
    others = [at for at in lives if at not in fixed]
    orders: Sequence[Callable[[int], tuple[int, ...]]] = (
        lambda at: (-lives[at].nbytes,),
        lambda at: (at < 0, -lives[at].nbytes),
        lambda at: (at < 0, lives[at].first - lives[at].last, -lives[at].nbytes),
        lambda at: (lives[at].first,),
    )
    found = (placed(sorted(others, key=order), lives, fixed, own, workspace) for order in orders)
    places, nbytes = min(found, key=lambda each: each[1])
    most = _ROOM * _most_at_once(lives.values())
    return (places, nbytes) if nbytes + sum(own.values()) <= most + LINE else None


def placed(
    order: Sequence[int], lives: dict[int, Life], fixed: dict[int, int], own: dict[int, int], workspace: int
) -> tuple[Places, int]:
    """Each in the first memory, the lowest place of it that has room; the workspace, the last, always has."""
    places: Places = {at: (memory, 0) for at, memory in fixed.items()}
    there: dict[int, list[tuple[int, Life]]] = {memory: [] for memory in (*own, workspace)}
    for at in fixed.keys() & lives.keys():
        there[fixed[at]].append((0, lives[at]))
    nbytes = 0
    for at in order:
        life = lives[at]
        for memory in there:
            offset = _lowest(life, there[memory])
            if memory == workspace or offset + life.nbytes <= own[memory]:
                break
        places[at] = memory, offset
        there[memory].append((offset, life))
        nbytes = max(nbytes, offset + life.room) if memory == workspace else nbytes
    return places, nbytes


def _lowest(life: Life, there: Iterable[tuple[int, Life]]) -> int:
    """The first gap beside those that live at the same time."""
    at = 0
    for offset, other in sorted((each for each in there if each[1].meets(life)), key=lambda each: each[0]):
        if at + life.nbytes <= offset:
            break
        at = max(at, offset + other.room)
    return at


def _most_at_once(lives: Iterable[Life]) -> int:
    lives = list(lives)
    return max(
        sum(other.nbytes for other in lives if other.first <= life.first <= other.last) for life in lives
    )


def dense_strides(shape: Shape) -> tuple[int, ...]:
    """Those of a tensor without gaps, as torch has them."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
