"""Which rows of numbers no other row is as good as or better than, in every column: the Pareto front of
thousands of rows.

Rows in order of their sum can only be covered by earlier ones. Some hundred at a time are compared with those
that are left of the earlier, and with each other: first all pairs in a few columns, then the pairs that are
left in the others.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int64]

_ROWS = 512  # compared at a time
_FIRST = 6  # columns in which all pairs are compared
_COLUMNS = 16  # compared at a time of the pairs that are left


def undominated(rows: Matrix) -> NDArray[np.intp]:
    """Indices of rows (n, columns) that no other covers: is nowhere larger than.

    Of equal rows the first stays; sums ascend.

    Sums of rows are compared as doubles: of rows whose sums differ by less, one that is covered may stay.
    """
    columns = np.flatnonzero((rows != rows[0]).any(axis=0))
    order = np.argsort(rows.sum(axis=1, dtype=np.float64), kind="stable")
    rows = rows[np.ix_(order, columns)]
    left = np.empty(0, dtype=np.intp)
    for start in range(0, len(rows), _ROWS):
        fresh = np.arange(start, min(start + _ROWS, len(rows)))
        if len(left):
            fresh = fresh[~_covered(rows[left], rows[fresh])]
        fresh = fresh[~_covered(rows[fresh], rows[fresh], earlier=True)]
        left = np.concatenate((left, fresh))
    return order[left]


def _covered(these: Matrix, others: Matrix, *, earlier: bool = False) -> NDArray[np.bool_]:
    """Which of the others one of these covers; `earlier`: only one that stands before it."""
    pairs = np.ones((len(these), len(others)), dtype=np.bool_)
    if earlier:
        pairs = np.triu(pairs, 1)
    width = these.shape[1]
    for column in _first(width):
        pairs &= these[:, column, None] <= others[None, :, column]
    one, other = np.nonzero(pairs)
    for start in range(0, width, _COLUMNS):
        if not len(one):
            break
        some = slice(start, start + _COLUMNS)
        holds = (these[one, some] <= others[other, some]).all(axis=1)
        one, other = one[holds], other[holds]
    covered = np.zeros(len(others), dtype=np.bool_)
    covered[other] = True
    return covered


@functools.cache
def _first(width: int) -> tuple[int, ...]:
    """The columns in which all pairs are compared: the first ones, and some that stand far apart."""
    apart = np.linspace(0, width - 1, min(_FIRST, width), dtype=int).tolist() if width else []
    return tuple(sorted({*range(min(3, width)), *apart}))
