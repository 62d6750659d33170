"""`block_front`: the Pareto front of (kept bytes, backward peak, seconds) of one block.

What an option is and what it takes: simulate.py. How values are held decides everything else, so a block of n
values has at most 2^n options, (2 + f)^n where each may be held in f other forms; and where host bytes are
scarce, they are a fourth measure of the front. Three stages find the front and one proves it, and each only
adds to what the one before found:

    greedy     keep all; keep what must be; and, as a min-cut would, keep what takes long to make per byte,
               for every threshold; the same with what is kept, or not, in one of its other forms: always
               there, however large the block                                              `_greedy`
    labels     dynamic program over the operators in reverse (search.py), first with few labels, then with
               all it takes. Exact where no label was dropped for lack of room
    z3         refutes "there is an option that none of these covers" (prove.py): the mathematics,
               constraint by constraint. What z3 finds instead is added, and it is asked again. Not where
               the labels' time ran out
    check      every option's figures come from the simulator, which knows nothing of the other two
                                                                                   `simulate.option`

Seconds are compared in whole ticks: exactly where 2^30 of them make up the block's time, else rounded up to
that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import le
from pathlib import Path

import numpy as np
import z3

from effcompile.core import effort
from effcompile.core.errors import UsageError
from effcompile.planner.remat import kept
from effcompile.planner.remat.check import check_block
from effcompile.planner.remat.grid import Grid
from effcompile.planner.remat.kept import KeptFront, hashed
from effcompile.planner.remat.layout import Layout, layout
from effcompile.planner.remat.problem import BlockOption, BlockProblem
from effcompile.planner.remat.prove import prove
from effcompile.planner.remat.search import Front, replayed, search
from effcompile.planner.remat.simulate import option

_ROOMS = (60, 600, 4000)  # labels at a time, pass after pass: each pass prunes with what the one before found
_SEARCH_SHARE = 0.8  # of the time; the rest is z3's
_MOST_KNOWN = 1000
_LEVELS = 16  # thresholds of the greedy options, about
_WORTH_KEEPING = 0.02  # seconds of search
#: Problem and points (their hash) → seconds that were given, and the front: subsets of levers have most of
#: their problems in common.
_known: dict[str, tuple[float, BlockFront]] = {}
#: Problem without its prices → its leanest options at other prices: a budget that was feasible stays so when
#: operators are timed again.
_leanest: dict[str, tuple[BlockOption, ...]] = {}
_fresh: dict[str, KeptFront] = {}  # found here and not yet kept for later processes
_from_disk: dict[Path, kept.Kept] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFront:
    """The options of a block and what is known about them.

    Attributes:
        options: least seconds first; thinned when the front has more points than asked for.
        found: how many points the front had before it was thinned.
        complete: nothing is missing from it, by the exhaustive search or by z3. `proven`: by z3.
        solver: name and version. seconds: time taken.
    """

    options: tuple[BlockOption, ...]
    found: int
    complete: bool
    proven: bool
    solver: str
    seconds: float


def block_front(problem: BlockProblem, *, timeout: float = 8.0, points: int = 40) -> BlockFront:
    """The Pareto front of (kept_bytes, backward_peak, seconds), least seconds first, and whether it is
    complete and proven.

    A front that this process has found is not looked for again, unless it is not complete and there is more
    time now. What was leanest of it, or of the block at other prices, is among the options however early the
    time is up.

    Args:
        problem: the block.
        timeout: seconds; then what has been found until then, at the least the greedy options.
        points: of a larger front about evenly many are left, among them the least seconds, kept bytes and
            peak.

    Raises:
        UsageError: the block contradicts itself, or timeout or points is not positive.
    """
    check_block(problem)
    if not (math.isfinite(timeout) and timeout > 0) or points < 3:
        raise UsageError(
            f"timeout = {timeout!r}, points = {points!r}: give a positive number of seconds, and at least "
            "3 points."
        )
    timeout = effort.allowed(timeout)
    key, alike = hashed(problem, points), hashed(_unpriced(problem), points)
    given, front = _known.get(key) or _read(key, problem)
    if front is None or (timeout > given and not front.proven):
        given, front = timeout, _found(problem, timeout, points, _leanest.get(alike, ()))
        effort.spend(front.seconds)
        if front.seconds > _WORTH_KEEPING:
            _fresh[key] = _as_kept(problem, given, front)
    elif key in _known:
        return front
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
        _leanest.clear()
    _known[key], _leanest[alike] = (given, front), _lean(front.options)
    return front


def keep_fronts() -> None:
    """Keep what was found since the last time for later processes."""
    if _fresh:
        _from_disk[kept.path()] = kept.write(kept.path(), _fresh)
        _fresh.clear()


def _read(key: str, problem: BlockProblem) -> tuple[float, BlockFront | None]:
    """(seconds that were given, the front) as an earlier process found it; none where none did."""
    file = kept.path()
    if file not in _from_disk:
        _from_disk[file] = kept.read(file)
    raw = _from_disk[file].get(key)
    found = kept.decoded(raw) if raw is not None else None
    options = found.options(problem) if found is not None else None
    if found is None or options is None:
        return 0.0, None
    solver = f"z3 {z3.get_version_string()}"
    front = BlockFront(
        options=tuple(_pareto(list(options), problem.scarce)), found=found.found, complete=found.complete,
        proven=found.proven, solver=solver, seconds=found.seconds,
    )  # fmt: skip
    return found.given, front


def _as_kept(problem: BlockProblem, given: float, front: BlockFront) -> KeptFront:
    values, forms = kept.values_of(front.options, problem)
    return KeptFront(
        given=given, seconds=front.seconds, found=front.found, complete=front.complete, proven=front.proven,
        kept=values, forms=forms
    )  # fmt: skip


def _unpriced(problem: BlockProblem) -> BlockProblem:
    """The block as if nothing took any time."""
    forms = {
        name: tuple(replace(form, seconds=0.0, out=0.0, back=0.0) for form in of)
        for name, of in problem.forms.items()
    }
    return replace(
        problem, forward=tuple(replace(op, seconds=0.0) for op in problem.forward), forms=forms, hidden=None
    )


def _lean(options: tuple[BlockOption, ...]) -> tuple[BlockOption, ...]:
    """Those that some budget needs, whatever they cost."""
    taken = {o: (o.kept_bytes, o.forward_peak, o.backward_peak, o.host_bytes) for o in options}
    return tuple(
        o
        for o, mine in taken.items()
        if not any(all(map(le, other, mine)) for other in taken.values() if other != mine)
    )


def _found(problem: BlockProblem, timeout: float, points: int, others: Iterable[BlockOption]) -> BlockFront:
    start = time.monotonic()
    small, front = layout(problem), Front()
    _greedy(small, front)
    until = start + _SEARCH_SHARE * timeout
    complete = any(search(small, front, room=room, deadline=until) for room in _passes(until))
    in_time = complete or time.monotonic() < until  # else z3 has no chance either
    proven = in_time and prove(small, front, deadline=start + timeout)
    found = [_option(problem, small, codes) for codes in front.points.values()]
    options = _pareto([o for o in found if o is not None], problem.scarce)
    before = [o for other in others if (o := option(problem, other.kept, other.forms)) is not None]
    return BlockFront(
        options=tuple(_pareto([*thinned(options, points, scarce=problem.scarce), *before], problem.scarce)),
        found=len(options),
        complete=complete or proven,
        proven=proven,
        solver=f"z3 {z3.get_version_string()}",
        seconds=time.monotonic() - start,
    )


def _passes(until: float) -> Iterator[int]:
    """The room of each pass. Once the time is up, what a narrower one would find the last one finds too."""
    yield from (room for room in _ROOMS[:-1] if time.monotonic() < until)
    yield _ROOMS[-1]


def joint_front(problem: BlockProblem, *, timeout: float = 8.0, points: int = 40) -> BlockFront:
    """`block_front`, and where values have other forms the fronts without any of them, and without
    recomputation, too.

    So however early the time is up, and whatever thinning leaves out, all levers together are never worse
    than recomputation alone or the forms alone. Up to three times `points` options; each part has a third of
    the time.
    """
    if not problem.forms:
        return block_front(problem, timeout=timeout, points=points)
    still = tuple(replace(op, repeatable=False) for op in problem.forward)
    parts = (problem, replace(problem, forms={}, hidden=None, scarce=False), replace(problem, forward=still))
    fronts = [
        block_front(part, timeout=timeout / 3, points=points)
        for i, part in enumerate(parts)
        if part not in parts[:i]
    ]
    options = _pareto([o for front in fronts for o in front.options], problem.scarce)
    return replace(
        fronts[0],
        options=tuple(options),
        found=max(fronts[0].found, len(options)),
        seconds=sum(f.seconds for f in fronts),
    )


def _option(problem: BlockProblem, small: Layout, codes: frozenset[int]) -> BlockOption | None:
    held = [small.held(code) for code in codes]
    forms = {small.names[v]: form.name for v, form in held if form is not None}
    return option(
        problem,
        (name for v, form in held if form is None and (name := small.names[v]) in problem.nbytes),
        forms,
    )


def _greedy(small: Layout, front: Front) -> None:
    """Keep what took at least θ ticks per byte to make, for every θ that tells two values apart.

    With forms: also those values, or the others, or both, in their m-th form, for every m.
    """
    grid = Grid(small)
    depth = max(map(len, small.forms), default=0)
    worth = [
        small.ticks[u] / max(1, small.size[v]) if (u := small.maker[v]) >= 0 else math.inf
        for v in range(len(small.names))
    ]
    levels = sorted(set(worth))
    tried = [
        frozenset(v for v, w in enumerate(worth) if w >= level)
        for level in [*levels[:: max(1, len(levels) // _LEVELS)], math.inf]
    ]
    tried += [some for kept in tried for m in range(depth) for some in _in_form(small, kept, m)]
    for chosen in dict.fromkeys(tried):
        point, codes, _ = replayed(small, grid, chosen)
        front.add(point, codes)


def _in_form(small: Layout, kept: frozenset[int], m: int) -> list[frozenset[int]]:
    """The kept values, the others, or all of them in their m-th form where they have one."""
    coded = {v: small.code(v, m) for v, forms in enumerate(small.forms) if m < len(forms)}
    moved, added = (
        frozenset(coded.get(v, v) for v in kept),
        frozenset(c for v, c in coded.items() if v not in kept),
    )
    return [moved, kept | added, moved | added]


def _pareto(options: list[BlockOption], scarce: bool) -> list[BlockOption]:
    """In order of seconds, what no other option covers.

    Ticks and seconds may differ in what they cover by rounding.
    """
    left: list[BlockOption] = []
    host = (lambda o: o.host_bytes) if scarce else lambda _: 0
    for o in sorted(
        options, key=lambda o: (o.seconds, o.kept_bytes, o.backward_peak, host(o), o.forward_peak)
    ):
        if not any(
            p.kept_bytes <= o.kept_bytes and p.backward_peak <= o.backward_peak and host(p) <= host(o)
            for p in left
        ):
            left.append(o)
    return left


def thinned(options: list[BlockOption], points: int, *, scarce: bool = False) -> list[BlockOption]:
    """The extremes, then again and again the option that is farthest from all chosen ones, each measure
    scaled to its range.

    Host bytes are a measure where they are `scarce`.
    """
    if len(options) <= points:
        return options
    rows = np.array(
        [[o.kept_bytes, o.backward_peak, o.seconds, o.host_bytes if scarce else 0] for o in options],
        dtype=np.float64,
    )
    rows = (rows - rows.min(axis=0)) / (rows.max(axis=0) - rows.min(axis=0)).clip(1e-30)
    everyone = range(len(options))
    chosen = [
        0,
        min(everyone, key=lambda i: (options[i].kept_bytes, options[i].seconds)),
        min(everyone, key=lambda i: (options[i].backward_peak, options[i].seconds)),
        *([min(everyone, key=lambda i: (options[i].host_bytes, options[i].seconds))] if scarce else []),
    ]
    far = np.min([np.linalg.norm(rows - rows[i], axis=1) for i in chosen], axis=0)
    while len(set(chosen)) < points:
        chosen.append(int(far.argmax()))
        far = np.minimum(far, np.linalg.norm(rows - rows[chosen[-1]], axis=1))
    return [options[i] for i in sorted(set(chosen))]
