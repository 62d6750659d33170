"""Finds a chain's choice: an exact dynamic program over (stage, bytes kept so far), thinned where that is too much.

Only S_i, what is kept before stage i, ties a stage to those before it, and a smaller S_i is never worse (links.py). So of
two ways to come to stage i the one with more kept and no fewer ticks can be dropped. So can one whose S_i no way on is
feasible from, or whose ticks with the least of all later stages reach those of a choice already known. What is left is
a staircase in (S_i, ticks); with more than `room` steps, only some of them all along it are followed, and the result
is a choice but no longer the proven best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effcompile.planner.remat.links import Links, Way

Vector = NDArray[np.int64]

_SLOPES = np.geomspace(0.02, 50.0, 41)


@dataclass(frozen=True, slots=True)
class Walk:
    """The best choice found (None: none below the limit, or out of time), and whether no label was dropped for lack of room."""

    choice: tuple[int, ...] | None
    exact: bool


def walk(links: Links, budget: int, *, below: int | None, room: int, deadline: float) -> Walk:
    """The least ticks within the budget and, where given, fewer than `below`, with at most `room` labels per stage."""
    reach, rest = _reach(links, budget), _rest(links)
    kept, ticks = np.zeros(1, np.int64), np.full(1, links.ticks, np.int64)
    trail: list[tuple[Vector, Vector]] = []
    exact = True
    for i, link in enumerate(links.links):
        if time.monotonic() > deadline:
            return Walk(None, False)
        table = _table(link.ways)
        most = np.array([min(link.reach(way, budget), reach[i + 1] - way.kept) for way in link.ways], np.int64)
        possible = kept[:, None] <= most
        if below is not None:
            possible &= ticks[:, None] + table[1] < below - rest[i + 1]
        parents, ways = np.nonzero(possible)
        kept, ticks = kept[parents] + table[0][ways], ticks[parents] + table[1][ways]
        left = _stairs(kept, ticks)
        if len(left) > room:
            exact, left = False, left[_nearest(kept[left], ticks[left], room)]
        kept, ticks = kept[left], ticks[left]
        trail.append((parents[left], ways[left]))
    if not len(ticks):
        return Walk(None, exact)
    return Walk(_back(trail, int(ticks.argmin())), exact)


def _table(ways: tuple[Way, ...]) -> Vector:
    """Row 0: kept bytes; row 1: ticks."""
    return np.array([[w.kept for w in ways], [w.ticks for w in ways]], np.int64)


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


def _nearest(kept: Vector, ticks: Vector, room: int) -> Vector:
    """Of a staircase in `room` equal parts, the ends and each part's step nearest to the convex hull: what mixes best with later stages.

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


def _reach(links: Links, budget: int) -> list[int]:
    """Per stage, and after the last, the most bytes kept before it from which the rest is feasible."""
    reach = [1 << 62]
    for link in reversed(links.links):
        reach.append(max(min(link.reach(way, budget), reach[-1] - way.kept) for way in link.ways))
    return reach[::-1]


def _rest(links: Links) -> list[int]:
    """Per stage, and after the last, the least ticks of it and all later ones."""
    rest = [0]
    for link in reversed(links.links):
        rest.append(rest[-1] + min(way.ticks for way in link.ways))
    return rest[::-1]
