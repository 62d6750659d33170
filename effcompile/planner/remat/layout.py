"""One block in small numbers: indices for names, whole ticks for seconds, and the backward without its dull instants.

Only steps that read a value can be places or last uses, so every value that is alive at one step between two such
*reading steps* is alive at all of them: of each such run only the step with the most of the backward's own bytes can be
the highest instant, and not even that one when a reading step beside it, where no fewer values are alive, has as many.

Instants stand on a grid (j, x): at reading step j, operator x of the forward runs again (0 ≤ x < n), or the step itself
runs (x = n), or the best of the run of steps after it (x = n + 1). A value is alive over an interval of that grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm

from effcompile.planner.remat.problem import BlockProblem

NEVER = 1 << 40
_FINE = 1 << 30  # ticks of the block's whole time when the seconds are no multiples of a coarser one


@dataclass(frozen=True, slots=True)
class Layout:
    """A BlockProblem by index. Operators count in forward order; a value's maker −1 is "entering".

    Attributes:
        names: of the values; `size`: their bytes; `maker`: operator index or −1.
        makes, reads: operator → values. `ticks`: operator → time in whole units of `tick` seconds.
        workspace, repeatable: of the operators.
        used: value → reading steps that read it, ascending. `readers`: value → operators that read it.
        steps: per reading step, the backward's bytes while it runs; `gaps`: right before it; `runs`: per j = −1 …, the most
            bytes after reading step j and before the next one, None when that cannot be the highest instant.
        forced: values that must be kept.
        places: operator → reading steps at which it may run again.
    """

    names: tuple[str, ...]
    size: tuple[int, ...]
    maker: tuple[int, ...]
    makes: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    ticks: tuple[int, ...]
    tick: Fraction
    workspace: tuple[int, ...]
    repeatable: tuple[bool, ...]
    used: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    gaps: tuple[int, ...]
    runs: tuple[int | None, ...]
    forced: frozenset[int]
    places: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.makes)


def layout(problem: BlockProblem) -> Layout:
    """The block by index."""
    names = tuple(problem.nbytes)
    index = {v: i for i, v in enumerate(names)}
    maker = [-1] * len(names)
    readers: list[list[int]] = [[] for _ in names]
    for u, op in enumerate(problem.forward):
        for v in op.makes:
            maker[index[v]] = u
        for v in dict.fromkeys(op.reads):
            readers[index[v]].append(u)
    reading = [t for t, step in enumerate(problem.backward) if step.reads]
    used: list[list[int]] = [[] for _ in names]
    for j, t in enumerate(reading):
        for v in dict.fromkeys(problem.backward[t].reads):
            used[index[v]].append(j)
    makes = tuple(tuple(index[v] for v in op.makes) for op in problem.forward)
    ticks, tick = _ticks([op.seconds for op in problem.forward])
    return Layout(
        names=names,
        size=tuple(problem.nbytes.values()),
        maker=tuple(maker),
        makes=makes,
        reads=tuple(tuple(index[v] for v in dict.fromkeys(op.reads)) for op in problem.forward),
        ticks=ticks,
        tick=tick,
        workspace=tuple(op.workspace for op in problem.forward),
        repeatable=tuple(op.repeatable for op in problem.forward),
        used=tuple(map(tuple, used)),
        readers=tuple(map(tuple, readers)),
        steps=tuple(problem.backward[t].live for t in reading),
        gaps=tuple(min(problem.backward[t - 1].live if t else 0, problem.backward[t].live) for t in reading),
        runs=_runs([step.live for step in problem.backward], reading),
        forced=frozenset(index[v] for v in problem.forced),
        places=_possible_places(makes, used, readers),
    )


def _runs(live: list[int], reading: list[int]) -> tuple[int | None, ...]:
    edges = [-1, *reading, len(live)]
    runs: list[int | None] = []
    for a, b in pairwise(edges):
        most = max(live[a + 1 : b], default=None)
        beside = [live[t] for t in (a, b) if 0 <= t < len(live)]
        runs.append(None if most is None or most <= max(beside, default=most - 1) else most)
    return tuple(runs)


def _possible_places(makes: tuple[tuple[int, ...], ...], used: list[list[int]], readers: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    places: list[set[int]] = [set() for _ in makes]
    for u in reversed(range(len(makes))):
        for v in makes[u]:
            places[u].update(used[v], *(places[w] for w in readers[v]))
    return tuple(tuple(sorted(p)) for p in places)


def _ticks(seconds: list[float]) -> tuple[tuple[int, ...], Fraction]:
    """Whole numbers in proportion to the seconds, exact where 2^30 of them reach; else each rounded up."""
    exact = [Fraction(s) for s in seconds]
    total = sum(exact, Fraction(0))
    if not total:
        return (0,) * len(exact), Fraction(1)
    bottom = lcm(*(s.denominator for s in exact))
    top = gcd(*(int(s * bottom) for s in exact))
    unit = max(Fraction(top, bottom), total / _FINE)
    return tuple(-int(-s // unit) for s in exact), unit
