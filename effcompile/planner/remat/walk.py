"""Finds a chain's choice: an exact dynamic program over (stage, bytes kept so far), thinned where that is too
much.

Only S_i, what is kept before stage i, ties a stage to those before it, and a smaller S_i is never worse
(links.py). So of two ways to come to stage i the one with more kept and no fewer ticks can be dropped. So can
one whose S_i no way on is feasible from, or whose ticks with the least of all later stages reach those of a
choice already known. What is left is a staircase in (S_i, ticks); with more than `room` steps, only some of
them all along it are followed, and the result is a choice but no longer the proven best. Where host bytes are
scarce they are a third number of a label, with its limit.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from effcompile.planner.remat.links import ChainLinks, ChainWay

Vector = NDArray[np.int64]

_SLOPES = np.geomspace(0.02, 50.0, 41)
_HOST_ROOM = 1_000  # labels at the most where host bytes count: there are many more of them
_FEASIBLE_ROOM = 40_000


@dataclass(frozen=True, slots=True)
class Walk:
    """The best choice found (None: none below the limit, or out of time), and whether no label was dropped
    for lack of room.
    """

    choice: tuple[int, ...] | None
    exact: bool


def walk(links: ChainLinks, budget: int, *, below: int | None, room: int, deadline: float) -> Walk:
    """The least ticks within the budget and, where given, fewer than `below`, with at most `room` labels per
    stage.
    """
    reach, rest, host_rest = (
        _reach(links, budget),
        _rest(links, lambda w: w.ticks),
        _rest(links, lambda w: w.host),
    )
    room = room if links.host is None else min(room, _HOST_ROOM)
    kept, ticks, host = np.zeros(1, np.int64), np.full(1, links.ticks, np.int64), np.zeros(1, np.int64)
    trail: list[tuple[Vector, Vector]] = []
    exact = True
    for i, link in enumerate(links.links):
        if time.monotonic() > deadline:
            return Walk(None, False)
        table = _table(link.ways)
        most = np.array(
            [min(link.reach(way, budget), reach[i + 1] - way.kept) for way in link.ways], np.int64
        )
        possible = kept[:, None] <= most
        if below is not None:
            possible &= ticks[:, None] + table[1] < below - rest[i + 1]
        if links.host is not None:
            possible &= host[:, None] + table[2] <= links.host - host_rest[i + 1]
        parents, ways = np.nonzero(possible)
        kept, ticks, host = (
            kept[parents] + table[0][ways],
            ticks[parents] + table[1][ways],
            host[parents] + table[2][ways],
        )
        left = _stairs(kept, ticks) if links.host is None else _steps(kept, ticks, host)
        if len(left) > room:
            exact, left = (
                False,
                left[
                    _nearest(kept[left], ticks[left], room)
                    if links.host is None
                    else _spaced(len(left), room)
                ],
            )
        kept, ticks, host = kept[left], ticks[left], host[left]
        trail.append((parents[left], ways[left]))
    if not len(ticks):
        return Walk(None, exact)
    return Walk(_back(trail, int(ticks.argmin())), exact)


def feasible(links: ChainLinks, budget: int) -> tuple[int, ...] | None:
    """A choice within the budget and the host's limit; None: there is none.

    Without a limit on the host the leanest (`Links.lean`); with one, that of the fewest host bytes within the
    budget, by the walk over (kept, host bytes) in the place of (kept, ticks).
    """
    if links.host is None:
        return links.lean(budget)
    turned = tuple(
        replace(link, ways=tuple(replace(way, ticks=way.host, host=0) for way in link.ways))
        for link in links.links
    )
    found = walk(
        replace(links, links=turned, ticks=0, host=None),
        budget,
        below=links.host + 1,
        room=_FEASIBLE_ROOM,
        deadline=math.inf,
    )
    return found.choice


def _table(ways: tuple[ChainWay, ...]) -> Vector:
    """Row 0: kept bytes; row 1: ticks; row 2: host bytes."""
    return np.array([[w.kept for w in ways], [w.ticks for w in ways], [w.host for w in ways]], np.int64)


def _stairs(kept: Vector, ticks: Vector) -> Vector:
    """Indices of the labels that no other has at most the bytes and the ticks of, by bytes."""
    order = np.lexsort((ticks, kept))
    if not len(order):
        return order
    sorted_ticks = ticks[order]
    best = np.minimum.accumulate(sorted_ticks)
    first = np.ones(len(order), bool)
    first[1:] = sorted_ticks[1:] < best[:-1]
    return order[first]


def _steps(kept: Vector, ticks: Vector, host: Vector) -> Vector:
    """Indices of the labels that no other has at most the bytes, the ticks and the host bytes of, by bytes.

    In order of bytes, a label is covered if the staircase in (ticks, host) of those before it passes below
    it.
    """
    left: list[int] = []
    stairs: list[tuple[int, int]] = []  # ascending ticks, descending host
    for i in np.lexsort((host, ticks, kept)).tolist():
        t, h = int(ticks[i]), int(host[i])
        at = bisect_right(stairs, (t, 1 << 62))
        if at and stairs[at - 1][1] <= h:
            continue
        end = at
        while end < len(stairs) and stairs[end][1] >= h:
            end += 1
        stairs[at:end] = [(t, h)]
        left.append(i)
    return np.array(left, dtype=np.int64)


def _spaced(count: int, room: int) -> Vector:
    return np.unique(np.linspace(0, count - 1, room).astype(np.int64))


def _nearest(kept: Vector, ticks: Vector, room: int) -> Vector:
    """Of a staircase in `room` equal parts, the ends and each part's step nearest to the convex hull: what
    mixes best with later stages.

    The hull is taken from below by tangents of slopes around the mean one.
    """
    x, y = (kept - kept[0]).astype(np.float64), (ticks - ticks[-1]).astype(np.float64)
    slopes = (y[0] / x[-1]) * _SLOPES[:, None]
    lines = y + slopes * x
    height = y - (lines.min(axis=1, keepdims=True) - slopes * x).max(axis=0)
    part = np.arange(len(x)) * room // len(x)
    order = np.lexsort((height, part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.unique(np.concatenate(([0, len(x) - 1], order[first])))


def _back(trail: list[tuple[Vector, Vector]], at: int) -> tuple[int, ...]:
    choice = []
    for parents, ways in reversed(trail):
        choice.append(int(ways[at]))
        at = int(parents[at])
    return tuple(reversed(choice))


def _reach(links: ChainLinks, budget: int) -> list[int]:
    """Per stage, and after the last, the most bytes kept before it from which the rest is feasible."""
    reach = [1 << 62]
    for link in reversed(links.links):
        reach.append(max(min(link.reach(way, budget), reach[-1] - way.kept) for way in link.ways))
    return reach[::-1]


def _rest(links: ChainLinks, measure: Callable[[ChainWay], int]) -> list[int]:
    """Per stage, and after the last, the least ticks, or host bytes, of it and all later ones."""
    rest = [0]
    for link in reversed(links.links):
        rest.append(rest[-1] + min(map(measure, link.ways)))
    return rest[::-1]
