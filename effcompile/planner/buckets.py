"""Which lengths to plan a step for, of those that a loader gives: as few as pay.

A batch of length l runs in the least bucket b ≥ l, and b − l of its tokens are padding. With k buckets the
least padding over the histogram is found exactly by dynamic programming over the lengths in ascending order,

    waste(k, j) = min over i < j of waste(k − 1, i) + Σ over i < m ≤ j of count(m) · (length(j) − length(m)),

and a further bucket is taken while it saves at least `worth` of the tokens: every bucket is planned and
verified by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

#: Lengths are rounded up to this, for kernels like whole tiles.
_TILE = 8
#: A further bucket saves at least this share of the tokens.
WORTH = 0.02
MOST = 8


def bucket_lengths(lengths: Iterable[int], most: int = MOST, worth: float = WORTH) -> list[int]:
    """Lengths to plan for, ascending; the last holds the longest batch."""
    count = Counter(-(-length // _TILE) * _TILE for length in lengths)
    known = sorted(count)
    tokens = sum(length * number for length, number in count.items())
    best = _waste(known, count, min(most, len(known)))
    taken = 1
    while taken < len(best) and best[taken - 1][0] - best[taken][0] >= worth * tokens:
        taken += 1
    return best[taken - 1][1]


def _waste(known: list[int], count: Counter[int], most: int) -> list[tuple[int, list[int]]]:
    """(padding, buckets) for 1, 2, ... of them."""

    def padding(first: int, last: int) -> int:
        return sum(count[known[m]] * (known[last] - known[m]) for m in range(first, last + 1))

    rows = [[(padding(0, j), [known[j]]) for j in range(len(known))]]
    for _ in range(1, most):
        before = rows[-1]
        row = []
        for j in range(len(known)):
            ways = [(before[i][0] + padding(i + 1, j), [*before[i][1], known[j]]) for i in range(j)]
            row.append(min(ways, default=before[j], key=lambda way: way[0]))
        rows.append(row)
    return [row[-1] for row in rows]
