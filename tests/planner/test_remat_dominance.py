"""Of rows of numbers those that no other covers, against comparing every pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from effcompile.planner.remat import dominance

ROWS = arrays.arrays(
    np.int64,
    st.tuples(st.integers(1, 60), st.integers(1, 12)),
    elements=st.integers(0, 4) | st.sampled_from([-(1 << 45), 1 << 45]),
)


def by_pairs(rows: np.ndarray) -> list[list[int]]:
    distinct = {tuple(row) for row in rows.tolist()}
    return sorted(
        list(r)
        for r in distinct
        if not any(all(a <= b for a, b in zip(o, r, strict=True)) for o in distinct if o != r)
    )


@given(rows=ROWS, together=st.integers(1, 9))
def test_what_is_left_is_what_no_other_row_covers(rows: np.ndarray, together: int) -> None:
    before, dominance._ROWS = dominance._ROWS, together  # so that chunks meet
    try:
        left = dominance.undominated(rows)
    finally:
        dominance._ROWS = before
    assert sorted(rows[left].tolist()) == by_pairs(rows)


def test_thousands_of_rows() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (3000, 3))
    assert sorted(rows[dominance.undominated(rows)].tolist()) == by_pairs(rows)
