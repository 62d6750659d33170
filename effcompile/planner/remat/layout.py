"""One block in small numbers: indices for names, whole ticks for seconds, and the backward without its dull
instants.

Only steps that read a value can be places or last uses, so every value that is alive at one step between two
such *reading steps* is alive at all of them: of each such run only the step with the most of the backward's
own bytes can be the highest instant, and not even that one when a reading step beside it, where no fewer
values are alive, has as many.

Instants stand on a grid (j, x): at reading step j, operator x of the forward runs again (0 ≤ x < n), or the
step itself runs (x = n), or the best of the run of steps after it (x = n + 1). At x = −2 what the step and
its operators need is restored from other forms; at x = −1 it is there. A value is alive over an interval of
that grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd, lcm

from effcompile.planner.remat.problem import BlockProblem, Residency, with_states

NEVER = 1 << 40
_FINE = 1 << 30  # ticks of the block's whole time when the seconds are no multiples of a coarser one


@dataclass(frozen=True, slots=True)
class Away:
    """A Form by index: bytes as there, ticks rounded up.

    Where copies are synchronous, `ticks` has the link's time too.
    """

    name: str
    held: int
    staged: int
    packed: int
    workspace: int
    host: int
    ticks: int
    out: int
    back: int

    @property
    def unpacks(self) -> bool:
        """Whether restoring takes bytes beside the value; else it is never the highest instant of
        its step.
        """
        return self.packed > 0 or self.workspace > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """A BlockProblem by index. Operators count in forward order; a value's maker −1 is "entering".

    Attributes:
        names: of the values; `size`: their bytes; `maker`: operator index or −1.
        makes, reads: operator → values. `ticks`: operator → time in whole units of `tick` seconds.
        workspace, repeatable: of the operators, where they run again.
        used: value → reading steps that read it, ascending. `readers`: value → operators that read it.
        steps: per reading step, the backward's bytes while it runs; `gaps`: right before it; `runs`: per j =
            −1 …, the most bytes after reading step j and before the next one, None when that cannot be the
            highest instant.
        forced: values that must be kept.
        places: operator → reading steps at which it may run again.
        forms: value → other forms in which it may be held.
        arrive: reading step → ticks of the backward before it, that hide copies to the device; () where
            copies are synchronous.
        depart: operator + 1 → ticks of the forward after it (0: after the block's beginning), that hide
            copies to the host.
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
    forms: tuple[tuple[Away, ...], ...] = ()
    arrive: tuple[int, ...] = ()
    depart: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.makes)

    def code(self, v: int, m: int) -> int:
        """The code of value v in its form m; the code v says that it is kept as it is."""
        return v + len(self.names) * (m + 1)

    def held(self, code: int) -> tuple[int, Away | None]:
        """What a code says: the value, and its form, None when it is kept."""
        m, v = divmod(code, len(self.names))
        return v, self.forms[v][m - 1] if m else None

    def needed(self, v: int) -> tuple[int, ...]:
        """Reading steps at which the value may first be needed."""
        return tuple(sorted({*self.used[v], *(j for w in self.readers[v] for j in self.places[w])}))


def layout(problem: BlockProblem) -> Layout:
    """The block by index, the states of generators among its values."""
    problem = with_states(problem)
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
    ticks, tick = _ticks([op.seconds for op in problem.forward], problem)
    forms = tuple(tuple(_away(f, tick, problem) for f in problem.forms.get(v, ())) for v in names)
    arrive, depart = _hiding(problem, reading, tick)
    return Layout(
        names=names,
        size=tuple(problem.nbytes.values()),
        maker=tuple(maker),
        makes=makes,
        reads=tuple(tuple(index[v] for v in dict.fromkeys(op.reads)) for op in problem.forward),
        ticks=ticks,
        tick=tick,
        workspace=tuple(op.workspace + op.state for op in problem.forward),
        repeatable=tuple(op.repeatable for op in problem.forward),
        used=tuple(map(tuple, used)),
        readers=tuple(map(tuple, readers)),
        steps=tuple(problem.backward[t].live for t in reading),
        gaps=tuple(min(problem.backward[t - 1].live if t else 0, problem.backward[t].live) for t in reading),
        runs=_runs([step.live for step in problem.backward], reading),
        forced=frozenset(index[v] for v in problem.forced),
        places=_possible_places(makes, used, readers),
        forms=forms,
        arrive=arrive,
        depart=depart,
    )


def _runs(live: list[int], reading: list[int]) -> tuple[int | None, ...]:
    edges = [-1, *reading, len(live)]
    runs: list[int | None] = []
    for a, b in pairwise(edges):
        most = max(live[a + 1 : b], default=None)
        beside = [live[t] for t in (a, b) if 0 <= t < len(live)]
        runs.append(None if most is None or most <= max(beside, default=most - 1) else most)
    return tuple(runs)


def _possible_places(
    makes: tuple[tuple[int, ...], ...], used: list[list[int]], readers: list[list[int]]
) -> tuple[tuple[int, ...], ...]:
    places: list[set[int]] = [set() for _ in makes]
    for u in reversed(range(len(makes))):
        for v in makes[u]:
            places[u].update(used[v], *(places[w] for w in readers[v]))
    return tuple(tuple(sorted(p)) for p in places)


def _ticks(seconds: list[float], problem: BlockProblem) -> tuple[tuple[int, ...], Fraction]:
    """Whole numbers in proportion to the seconds, exact where 2^30 of them reach; else each rounded up.

    With their unit.
    """
    others = [s for forms in problem.forms.values() for f in forms for s in (f.seconds, f.out, f.back)]
    exact = [Fraction(s) for s in (*seconds, *others, *((problem.hidden or ()) if others else ()))]
    total = sum(exact, Fraction(0))
    if not total:
        return (0,) * len(seconds), Fraction(1)
    bottom = lcm(*(s.denominator for s in exact))
    top = gcd(*(int(s * bottom) for s in exact))
    unit = max(Fraction(top, bottom), total / _FINE)
    return tuple(_up(s, unit) for s in seconds), unit


def _up(seconds: float, unit: Fraction) -> int:
    return -int(-Fraction(seconds) // unit)


def _away(form: Residency, tick: Fraction, problem: BlockProblem) -> Away:
    synchronous = problem.hidden is None
    ticks = _up(form.seconds, tick) + (_up(form.out, tick) + _up(form.back, tick) if synchronous else 0)
    out, back = (0, 0) if synchronous else (_up(form.out, tick), _up(form.back, tick))
    host = form.host if problem.scarce else 0
    return Away(form.name, form.held, form.staged, form.packed, form.workspace, host, ticks, out, back)


def _hiding(
    problem: BlockProblem, reading: list[int], tick: Fraction
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(`arrive`, `depart`), rounded down, so that no copy counts as hidden that is not; () where nothing is
    held elsewhere.
    """
    if problem.hidden is None or not any(problem.forms.values()):
        return (), ()
    before = [Fraction(0), *accumulate(map(Fraction, problem.hidden))]
    passed = [Fraction(0), *accumulate(Fraction(op.seconds) for op in problem.forward)]
    return tuple(int(before[t] // tick) for t in reading), tuple(
        int((passed[-1] - p) // tick) for p in passed
    )
