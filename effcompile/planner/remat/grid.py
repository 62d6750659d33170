"""The instants of one block's step at which bytes are counted, and the deadlines of its copies,
as vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from effcompile.planner.remat.layout import Layout

Vector = NDArray[np.int64]

ABSENT = -(1 << 60)  # bytes of an instant that does not occur


class Grid:
    """The instants of a layout as one vector: codes that order them, and the bytes there before any value is.

    `late`: what every deadline of the link has before any copy: steps that wait for copies to the device,
    then points of the forward from which on copies go to the host. Minus the ticks that hide them.
    """

    def __init__(self, layout: Layout) -> None:
        self.width = layout.count + 4
        codes = [
            self.code(j, layout.count + 1)
            for j in range(-1, len(layout.steps))
            if layout.runs[j + 1] is not None
        ]
        base: list[int] = [run for run in layout.runs if run is not None]
        codes += [self.code(j, layout.count) for j in range(len(layout.steps))]
        base += layout.steps
        pairs = [(j, u) for u, places in enumerate(layout.places) for j in places]
        self.again = {pair: len(codes) + i for i, pair in enumerate(pairs)}
        restored = [
            (j, v)
            for v, forms in enumerate(layout.forms)
            if any(f.unpacks for f in forms)
            for j in layout.needed(v)
        ]
        self.restored = {pair: len(codes) + len(pairs) + i for i, pair in enumerate(restored)}
        codes += [self.code(j, u) for j, u in pairs] + [self.code(j, -2) for j, _ in restored]
        base += [ABSENT] * (len(pairs) + len(restored))
        self.instants = len(codes)
        # (j, x) of every instant
        self.points = [(code // self.width - 2, code % self.width - 2) for code in codes]
        # alive before the operators of step j, no instant itself
        codes += [self.code(j, -1) for j in range(len(layout.gaps))]
        # while values are restored: neither
        codes += [self.code(j, -2) for j in range(len(layout.gaps))] if restored else []
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

    def stalls(self, late: NDArray[np.int64]) -> Vector:
        """Ticks that the copies add, of each row: the latest deadline of the backward and of the forward."""
        return np.asarray(
            late[:, : self.arrivals].max(axis=1, initial=0) + late[:, self.arrivals :].max(axis=1, initial=0)
        )
