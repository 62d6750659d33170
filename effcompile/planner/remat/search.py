"""Finds a block's options: labels over the operators in reverse, the better of two that have the same future.

From the last operator to the first, and the entering values at the end, each value that something will read in the
backward is kept, made again, or held in one of its other forms. All its readers are decided by then, so the interval of
the grid (layout.py) over which it is alive is known, and only ever more bytes are added to an instant, and more seconds
of the link to a deadline (`late`: a step that waits for copies, or the end of the forward; simulate.stall). A label
carries the bytes of every instant and the lateness of every deadline so far. Of two labels in which the same undecided
values are read over the same intervals, one that has no fewer bytes kept, time, host bytes, bytes at any instant and
lateness at any deadline can be dropped: whatever completes it completes the other. So can a label that is no better
already than a complete option. If no label is dropped for lack of room, what is left is the whole front.

How a value is held is one number, its code (`Layout.code`): the value's own for "kept".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from effcompile.planner.remat.layout import NEVER, Away, Layout

Vector = NDArray[np.int64]
Point = tuple[int, int, int, int]  # kept bytes, backward peak, ticks, host bytes (0 where they do not count)

_ABSENT = -(1 << 60)  # an instant that does not occur
_UNREAD = -1  # last use of a forced value that nothing has read yet: it stays to the end


@dataclass(slots=True)
class Front:
    """Options found so far, none of them as good as another in all measures; how each holds its values, in codes."""

    points: dict[Point, frozenset[int]] = field(default_factory=dict)

    def covers(self, point: Point) -> bool:
        """Whether some option found is as good or better in every measure."""
        k, p, t, h = point
        return any(a <= k and b <= p and c <= t and d <= h for a, b, c, d in self.points)

    def add(self, point: Point, kept: frozenset[int]) -> bool:
        if self.covers(point):
            return False
        k, p, t, h = point
        for worse in [q for q in self.points if k <= q[0] and p <= q[1] and t <= q[2] and h <= q[3]]:
            del self.points[worse]
        self.points[point] = kept
        return True


@dataclass(frozen=True, slots=True)
class _Label:
    need: dict[int, tuple[int, int]]  # undecided value → (first reading step, grid code of its last use)
    load: Vector
    kept: frozenset[int]
    size: int
    ticks: int
    host: int
    late: Vector


class Grid:
    """The instants of a layout as one vector: codes that order them, and the bytes there before any value is.

    `late`: what every deadline of the link has before any copy: steps that wait for copies to the device, then points of
    the forward from which on copies go to the host. Minus the ticks that hide them.
    """

    def __init__(self, layout: Layout) -> None:
        self.width = layout.count + 4
        codes = [self.code(j, layout.count + 1) for j in range(-1, len(layout.steps)) if layout.runs[j + 1] is not None]
        base: list[int] = [run for run in layout.runs if run is not None]
        codes += [self.code(j, layout.count) for j in range(len(layout.steps))]
        base += layout.steps
        pairs = [(j, u) for u, places in enumerate(layout.places) for j in places]
        self.again = {pair: len(codes) + i for i, pair in enumerate(pairs)}
        restored = [(j, v) for v, forms in enumerate(layout.forms) if any(f.unpacks for f in forms) for j in layout.needed(v)]
        self.restored = {pair: len(codes) + len(pairs) + i for i, pair in enumerate(restored)}
        codes += [self.code(j, u) for j, u in pairs] + [self.code(j, -2) for j, _ in restored]
        base += [_ABSENT] * (len(pairs) + len(restored))
        self.instants = len(codes)
        self.points = [(code // self.width - 2, code % self.width - 2) for code in codes]  # (j, x) of every instant
        codes += [self.code(j, -1) for j in range(len(layout.gaps))]  # alive before the operators of step j, no instant itself
        codes += [self.code(j, -2) for j in range(len(layout.gaps))] if restored else []  # while values are restored: neither
        self.codes = np.array(codes, dtype=np.int64)
        self.base = np.array([*base, *(0 for _ in codes[self.instants :])], dtype=np.int64)
        self.end = self.code(len(layout.steps), 0)
        self.late = -np.array([*layout.arrive, *layout.depart], dtype=np.int64)
        self.arrivals = len(layout.arrive)
        self._masks: dict[tuple[int, int], Vector] = {}

    def code(self, j: int, x: int) -> int:
        """Grid point (j, x), 0 for the backward's beginning."""
        return (j + 2) * self.width + x + 2

    def alive(self, begin: int, end: int) -> Vector:
        """1 where begin ≤ instant ≤ end."""
        mask = self._masks.get((begin, end))
        if mask is None:
            mask = ((self.codes >= begin) & (self.codes <= end)).astype(np.int64)
            self._masks[begin, end] = mask
        return mask

    def peak(self, load: Vector) -> int:
        return int(load[: self.instants].max(initial=_ABSENT))

    def stall(self, late: Vector) -> int:
        """Ticks that the copies add: the latest deadline of the backward and of the forward."""
        return int(late[: self.arrivals].max(initial=0)) + int(late[self.arrivals :].max(initial=0))


def search(layout: Layout, front: Front, *, room: int, deadline: float) -> bool:
    """Add options to the front; at most `room` labels at a time. True when the front is then complete.

    After the deadline it goes on with a fiftieth of the room, to end with complete options: milliseconds per operator.
    """
    grid = Grid(layout)
    labels, complete = [_start(layout, grid)], True
    for u, values in _order(layout):
        after = [label for old in labels for label in _decide(layout, grid, old, u, values)]
        labels = _undominated([label for label in after if not front.covers(_point(grid, label))], deadline)
        if len(labels) > room:
            labels, complete = _thinned(grid, labels, room), False
        if time.monotonic() > deadline:
            labels, complete = labels[: max(1, room // 50)], False
    for label in labels:
        front.add(_point(grid, label), label.kept)
    return complete


def replayed(layout: Layout, grid: Grid, kept: frozenset[int]) -> tuple[Point, frozenset[int], Vector]:
    """The option that holds of these values those that something reads, and what must be kept: measures, codes, bytes per instant."""
    label = _replayed(layout, grid, kept)
    return _point(grid, label), label.kept, label.load


def lateness(layout: Layout, grid: Grid, kept: frozenset[int]) -> tuple[int | None, int | None]:
    """The deadlines (reading step, operator + 1) at which an option waits longest for the link; None: none is missed."""
    late = _replayed(layout, grid, kept).late
    back, out = late[: grid.arrivals], late[grid.arrivals :]
    return int(back.argmax()) if back.max(initial=0) > 0 else None, int(out.argmax()) if out.max(initial=0) > 0 else None


def _replayed(layout: Layout, grid: Grid, kept: frozenset[int]) -> _Label:
    label = _start(layout, grid)
    others = {v: form for v, form in map(layout.held, kept) if form is not None}
    for u, values in _order(layout):
        wanted = [v for v in values if v in label.need]
        must = u < 0 or not layout.repeatable[u]
        away = {v: others[v] for v in wanted if v in others and v not in layout.forced}
        keep = [v for v in wanted if v not in away and (must or v in kept or v in layout.forced)]
        label = _after(layout, grid, label, u, keep, away, [v for v in wanted if v not in keep and v not in away])
    return label


def _start(layout: Layout, grid: Grid) -> _Label:
    need = dict.fromkeys(layout.forced, (NEVER, _UNREAD))
    need.update({v: (used[0], grid.code(used[-1], layout.count)) for v, used in enumerate(layout.used) if used})
    return _Label(need, grid.base, frozenset(), 0, 0, 0, grid.late)


def _order(layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """(operator, the values it makes) from the last to the first; then (−1, the entering values)."""
    order = [(u, layout.makes[u]) for u in reversed(range(layout.count))]
    return [*order, (-1, tuple(v for v, maker in enumerate(layout.maker) if maker < 0))]


def _point(grid: Grid, label: _Label) -> Point:
    peak = max(grid.peak(label.load), label.size if grid.instants == 0 else _ABSENT)
    return label.size, peak, label.ticks + (grid.stall(label.late) if len(label.late) else 0), label.host


def _decide(layout: Layout, grid: Grid, label: _Label, u: int, values: tuple[int, ...]) -> Iterator[_Label]:
    """The label's successors: every way to hold or recompute what operator u makes (−1: what enters)."""
    wanted = [v for v in values if v in label.need]
    if not wanted:
        yield label
        return
    must = u < 0 or not layout.repeatable[u]
    for choice in product(*(_ways(layout, v, must) for v in wanted)):
        ways = list(zip(wanted, choice, strict=True))
        keep = [v for v, way in ways if way is True]
        away = {v: way for v, way in ways if isinstance(way, Away)}
        yield _after(layout, grid, label, u, keep, away, [v for v, way in ways if way is False])


def _ways(layout: Layout, v: int, must: bool) -> tuple[bool | Away, ...]:
    """Kept (True), made again (False), or held in a form."""
    if v in layout.forced:
        return (True,)
    return (True, *layout.forms[v]) if must else (True, False, *layout.forms[v])


def _after(layout: Layout, grid: Grid, label: _Label, u: int, keep: list[int], away: Mapping[int, Away], again: list[int]) -> _Label:
    need = {v: span for v, span in label.need.items() if v not in keep and v not in again and v not in away}
    load, ticks = label.load.copy(), label.ticks
    if again:
        place = min(label.need[v][0] for v in again)
        at = grid.again[place, u]
        load[at] = load[grid.instants + place] + layout.gaps[place] + layout.workspace[u] + sum(layout.size[v] for v in layout.makes[u])
        begin = grid.code(place, u)
        for v in again:
            load += layout.size[v] * grid.alive(begin + 1, label.need[v][1])
        for v in layout.reads[u]:
            first, last = need.get(v, (NEVER, 0))
            need[v] = min(first, place), max(last, begin)
        ticks += layout.ticks[u]
    for v in keep:
        last = label.need[v][1]
        load += layout.size[v] * grid.alive(0, grid.end if last == _UNREAD else last)
    size, codes = label.size + sum(layout.size[v] for v in keep), label.kept.union(keep)
    late, host = label.late, label.host
    for v, form in away.items():
        _put_away(layout, grid, load, v, form, label.need[v])
        late = _later(layout, grid, late, u, form, label.need[v][0])
        size, ticks, host = size + form.held, ticks + form.ticks, host + form.host
        codes |= {layout.code(v, layout.forms[v].index(form))}
    return _Label(need, load, codes, size, ticks, host, late)


def _put_away(layout: Layout, grid: Grid, load: Vector, v: int, form: Away, span: tuple[int, int]) -> None:
    """Add what a value in another form takes: its packed copy until it is restored, itself from then on."""
    place, last = span
    begin = grid.code(place, -2)
    if form.unpacks:
        at = grid.restored[place, v]
        load[at] = load[grid.instants + len(layout.gaps) + place] + layout.gaps[place] + form.workspace
        load += form.packed * grid.alive(0 if form.staged else begin, begin)
    load += layout.size[v] * grid.alive(0 if form.staged and not form.packed else begin, last)


def _later(layout: Layout, grid: Grid, late: Vector, u: int, form: Away, place: int) -> Vector:
    """What a copy adds to the deadlines: to steps from the one that needs it, and to all of the forward until it is made."""
    if not len(late):
        return late
    late = late.copy()
    late[place : grid.arrivals] += form.back
    late[grid.arrivals : grid.arrivals + u + 2] += form.out
    return late


def _undominated(labels: list[_Label], deadline: float) -> list[_Label]:
    """Drop a label when another with the same future has no more of anything; after the deadline keep them all."""
    groups: dict[frozenset[tuple[int, tuple[int, int]]], list[_Label]] = {}
    for label in labels:
        groups.setdefault(frozenset(label.need.items()), []).append(label)
    left: list[_Label] = []
    for group in groups.values():
        if len(group) == 1:
            left += group
            continue
        rows = np.stack([np.concatenate((label.load, label.late, [label.size, label.ticks, label.host])) for label in group])
        order = np.argsort(rows.astype(np.float64).clip(0).sum(axis=1), kind="stable")
        rows = rows[order]
        alive: list[int] = []
        for i in range(len(group)):
            if not alive or time.monotonic() > deadline or not (rows[alive] <= rows[i]).all(axis=1).any():
                alive.append(i)
        left += [group[order[i]] for i in alive]
    return left


def _thinned(grid: Grid, labels: list[_Label], room: int) -> list[_Label]:
    """The most promising labels for every amount kept: per eighth of them by kept bytes, those of least weighted time and peak."""
    points = np.array([_point(grid, label) for label in labels], dtype=np.float64)
    points -= points.min(axis=0)
    points /= points.max(axis=0).clip(1e-9)
    chosen: dict[int, None] = {}
    weights = [(w, x, 1.0, 0.1) for w in (0.05, 0.3, 1.0, 3.0, 20.0) for x in (0.05, 0.3, 1.0, 3.0, 20.0)]
    for weight in weights:
        chosen.update(dict.fromkeys(np.argsort(points @ np.array(weight), kind="stable")[: max(1, room // len(weights))].tolist()))
    return [labels[i] for i in chosen]
