"""Finds a block's options: labels over the operators in reverse, the better of two that have the same future.

From the last operator to the first, and the entering values at the end, each value that something will read
in the backward is kept, made again, or held in one of its other forms. All its readers are decided by then,
so the interval of the grid (grid.py) over which it is alive is known, and only ever more bytes are added to
an instant, and more seconds of the link to a deadline (`late`: a step that waits for copies, or the end of
the forward; simulate.stall). A label carries the bytes of every instant and the lateness of every deadline so
far. Of two labels in which the same undecided values are read over the same intervals, one that has no fewer
bytes kept, time, host bytes, bytes at any instant and lateness at any deadline can be dropped: whatever
completes it completes the other. So can a label that is no better already than a complete option. If no label
is dropped for lack of room, what is left is the whole front.

Labels with the same future are the rows of matrices, and a decision adds the same to all of them. There are
few futures (tens, of thousands of labels), so that a step of the search is a few operations of numpy.

How a value is held is one number, its code (`Layout.code`): the value's own for "kept".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from effcompile.planner.remat.dominance import undominated
from effcompile.planner.remat.grid import Grid, Vector
from effcompile.planner.remat.layout import NEVER, Away, Layout

Matrix = NDArray[np.int64]
Codes = NDArray[np.uint64]
Point = tuple[int, int, int, int]  # kept bytes, backward peak, ticks, host bytes (0 where they do not count)

_UNREAD = -1  # last use of a forced value that nothing has read yet: it stays to the end
_KEPT, _TICKS, _HOST = range(3)  # columns of what was taken
#: Weights of ticks and peak beside kept bytes, for which the best labels stay when there are too many.
_WEIGHTS = tuple((w, x, 1.0, 0.1) for w in (0.05, 0.3, 1.0, 3.0, 20.0) for x in (0.05, 0.3, 1.0, 3.0, 20.0))


@dataclass(slots=True)
class Front:
    """Options found so far, none of them as good as another in all measures; how each holds its values, in
    codes.
    """

    points: dict[Point, frozenset[int]] = field(default_factory=dict)
    _rows: Matrix | None = None  # the points, as long as none is added

    def covers(self, point: Point) -> bool:
        """Whether some option found is as good or better in every measure."""
        k, p, t, h = point
        return any(a <= k and b <= p and c <= t and d <= h for a, b, c, d in self.points)

    def covered(self, points: Matrix) -> NDArray[np.bool_]:
        """`covers`, of each row of points."""
        if not self.points:
            return np.zeros(len(points), dtype=np.bool_)
        if self._rows is None:
            self._rows = np.array(list(self.points), dtype=np.int64)
        return np.any(np.all(self._rows[None] <= points[:, None], axis=2), axis=1)

    def add(self, point: Point, kept: frozenset[int]) -> bool:
        if self.covers(point):
            return False
        k, p, t, h = point
        for worse in [q for q in self.points if k <= q[0] and p <= q[1] and t <= q[2] and h <= q[3]]:
            del self.points[worse]
        self.points[point] = kept
        self._rows = None
        return True


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels with the same future, one to a row.

    Attributes:
        need: undecided value → (first reading step, grid code of its last use).
        load: bytes at every instant. late: of every deadline. taken: kept bytes, ticks, host bytes.
        codes: how the decided values are held, as bits.
    """

    need: Mapping[int, tuple[int, int]]
    load: Matrix
    late: Matrix
    taken: Matrix
    codes: Codes

    def __len__(self) -> int:
        return len(self.taken)

    def rows(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> _Labels:
        return _Labels(
            self.need, self.load[chosen], self.late[chosen], self.taken[chosen], self.codes[chosen]
        )

    def held(self, row: int) -> frozenset[int]:
        """The codes of one label."""
        bits = np.unpackbits(self.codes[row].view(np.uint8), bitorder="little")
        return frozenset(np.flatnonzero(bits).tolist())

    def points(self, grid: Grid) -> Matrix:
        """The measures of each, if nothing more were taken."""
        peak = self.load[:, : grid.instants].max(axis=1) if grid.instants else self.taken[:, _KEPT]
        ticks = self.taken[:, _TICKS] + (grid.stalls(self.late) if self.late.shape[1] else 0)
        return np.stack([self.taken[:, _KEPT], peak, ticks, self.taken[:, _HOST]], axis=1)


def search(layout: Layout, front: Front, *, room: int, deadline: float) -> bool:
    """Add options to the front; at most `room` labels at a time. True when the front is then complete.

    After the deadline it goes on with a fiftieth of the room, to end with complete options: milliseconds per
    operator.
    """
    grid = Grid(layout)
    groups, complete = [_start(layout, grid)], True
    for u, values in _order(layout):
        after = _joined(new for group in groups for new in _decide(layout, grid, group, u, values))
        groups = [_pruned(group, grid, front) for group in after]
        late = time.monotonic() > deadline
        most = max(1, room // 50) if late else room
        complete = complete and not late
        if sum(map(len, groups)) > most:
            groups, complete = _thinned(grid, groups, most), False
    for group in groups:
        for row, (kept, peak, ticks, host) in enumerate(group.points(grid).tolist()):
            front.add((kept, peak, ticks, host), group.held(row))
    return complete


def replayed(layout: Layout, grid: Grid, kept: frozenset[int]) -> tuple[Point, frozenset[int], Vector]:
    """The option that holds of these values those that something reads, and what must be kept: measures,
    codes, bytes per instant.
    """
    label = _replayed(layout, grid, kept)
    kept_bytes, peak, ticks, host = label.points(grid)[0].tolist()
    return (kept_bytes, peak, ticks, host), label.held(0), label.load[0]


def lateness(layout: Layout, grid: Grid, kept: frozenset[int]) -> tuple[int | None, int | None]:
    """The deadlines (reading step, operator + 1) at which an option waits longest for the link; None: none is
    missed.
    """
    late = _replayed(layout, grid, kept).late[0]
    back, out = late[: grid.arrivals], late[grid.arrivals :]
    return int(back.argmax()) if back.max(initial=0) > 0 else None, int(out.argmax()) if out.max(
        initial=0
    ) > 0 else None


def _replayed(layout: Layout, grid: Grid, kept: frozenset[int]) -> _Labels:
    label = _start(layout, grid)
    others = {v: form for v, form in map(layout.held, kept) if form is not None}
    for u, values in _order(layout):
        wanted = [v for v in values if v in label.need]
        must = u < 0 or not layout.repeatable[u]
        away = {v: others[v] for v in wanted if v in others and v not in layout.forced}
        keep = [v for v in wanted if v not in away and (must or v in kept or v in layout.forced)]
        label = _after(
            layout, grid, label, u, keep, away, [v for v in wanted if v not in keep and v not in away]
        )
    return label


def _start(layout: Layout, grid: Grid) -> _Labels:
    need = dict.fromkeys(layout.forced, (NEVER, _UNREAD))
    need.update(
        {v: (used[0], grid.code(used[-1], layout.count)) for v, used in enumerate(layout.used) if used}
    )
    codes = len(layout.names) * (1 + max(map(len, layout.forms), default=0))
    empty = np.zeros((1, -(-codes // 64)), dtype=np.uint64)
    return _Labels(need, grid.base[None], grid.late[None], np.zeros((1, 3), dtype=np.int64), empty)


def _order(layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """(operator, the values it makes) from the last to the first; then (−1, the entering values)."""
    order = [(u, layout.makes[u]) for u in reversed(range(layout.count))]
    return [*order, (-1, tuple(v for v, maker in enumerate(layout.maker) if maker < 0))]


def _joined(groups: Iterable[_Labels]) -> list[_Labels]:
    """Labels with the same future together."""
    alike: dict[frozenset[tuple[int, tuple[int, int]]], list[_Labels]] = {}
    for group in groups:
        alike.setdefault(frozenset(group.need.items()), []).append(group)
    return [found[0] if len(found) == 1 else _stacked(found) for found in alike.values()]


def _stacked(groups: Sequence[_Labels]) -> _Labels:
    return _Labels(
        groups[0].need, np.concatenate([g.load for g in groups]), np.concatenate([g.late for g in groups]),
        np.concatenate([g.taken for g in groups]), np.concatenate([g.codes for g in groups]),
    )  # fmt: skip


def _pruned(group: _Labels, grid: Grid, front: Front) -> _Labels:
    """Without labels that are no better than a complete option, or than another."""
    covered = front.covered(group.points(grid))
    group = group.rows(~covered) if covered.any() else group
    if len(group) < 2:
        return group
    load = np.maximum(group.load, -1)  # what is added to an instant that does not occur says nothing
    return group.rows(undominated(np.concatenate((group.taken, load, group.late), axis=1)))


def _decide(layout: Layout, grid: Grid, group: _Labels, u: int, values: tuple[int, ...]) -> Iterator[_Labels]:
    """The labels' successors: every way to hold or recompute what operator u makes (−1: what enters)."""
    wanted = [v for v in values if v in group.need]
    if not wanted:
        yield group
        return
    must = u < 0 or not layout.repeatable[u]
    for choice in product(*(_ways(layout, v, must) for v in wanted)):
        ways = list(zip(wanted, choice, strict=True))
        keep = [v for v, way in ways if way is True]
        away = {v: way for v, way in ways if isinstance(way, Away)}
        yield _after(layout, grid, group, u, keep, away, [v for v, way in ways if way is False])


def _ways(layout: Layout, v: int, must: bool) -> tuple[bool | Away, ...]:
    """Kept (True), made again (False), or held in a form."""
    if v in layout.forced:
        return (True,)
    return (True, *layout.forms[v]) if must else (True, False, *layout.forms[v])


def _after(
    layout: Layout,
    grid: Grid,
    group: _Labels,
    u: int,
    keep: list[int],
    away: Mapping[int, Away],
    again: list[int],
) -> _Labels:
    need = {v: span for v, span in group.need.items() if v not in keep and v not in again and v not in away}
    load, taken, codes = group.load.copy(), group.taken.copy(), group.codes.copy()
    if again:
        place = min(group.need[v][0] for v in again)
        here = layout.gaps[place] + layout.workspace[u] + sum(layout.size[v] for v in layout.makes[u])
        load[:, grid.again[place, u]] = load[:, grid.instants + place] + here
        begin = grid.code(place, u)
        load += sum(layout.size[v] * grid.alive(begin + 1, group.need[v][1]) for v in again)
        for v in layout.reads[u]:
            first, last = need.get(v, (NEVER, 0))
            need[v] = min(first, place), max(last, begin)
        taken[:, _TICKS] += layout.ticks[u]
    for v in keep:
        last = group.need[v][1]
        load += layout.size[v] * grid.alive(0, grid.end if last == _UNREAD else last)
        _mark(codes, v)
    taken[:, _KEPT] += sum(layout.size[v] for v in keep)
    late = group.late
    for v, form in away.items():
        _put_away(layout, grid, load, v, form, group.need[v])
        late = _later(grid, late, u, form, group.need[v][0])
        taken += (form.held, form.ticks, form.host)
        _mark(codes, layout.code(v, layout.forms[v].index(form)))
    return _Labels(need, load, late, taken, codes)


def _mark(codes: Codes, code: int) -> None:
    codes[:, code // 64] |= np.uint64(1 << code % 64)


def _put_away(layout: Layout, grid: Grid, load: Matrix, v: int, form: Away, span: tuple[int, int]) -> None:
    """Add what a value in another form takes: its packed copy until it is restored, itself from then on."""
    place, last = span
    begin = grid.code(place, -2)
    if form.unpacks:
        at = grid.restored[place, v]
        load[:, at] = load[:, grid.instants + len(layout.gaps) + place] + layout.gaps[place] + form.workspace
        load += form.packed * grid.alive(0 if form.staged else begin, begin)
    load += layout.size[v] * grid.alive(0 if form.staged and not form.packed else begin, last)


def _later(grid: Grid, late: Matrix, u: int, form: Away, place: int) -> Matrix:
    """What a copy adds to the deadlines: to steps from the one that needs it, and to all of the forward until
    it is made.
    """
    if not late.shape[1]:
        return late
    late = late.copy()
    late[:, place : grid.arrivals] += form.back
    late[:, grid.arrivals : grid.arrivals + u + 2] += form.out
    return late


def _thinned(grid: Grid, groups: Sequence[_Labels], room: int) -> list[_Labels]:
    """The most promising labels: those of least weighted kept bytes, peak and time, for several weights."""
    points = np.concatenate([group.points(grid) for group in groups]).astype(np.float64)
    points -= points.min(axis=0)
    points /= points.max(axis=0).clip(1e-9)
    chosen = np.zeros(len(points), dtype=np.bool_)
    each = max(1, room // len(_WEIGHTS))
    for weight in _WEIGHTS:
        chosen[np.argsort(points @ np.array(weight), kind="stable")[:each]] = True
    ends = np.cumsum([len(group) for group in groups])
    return [
        group.rows(own) for group, own in zip(groups, np.split(chosen, ends[:-1]), strict=True) if own.any()
    ]
