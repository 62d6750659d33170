"""Places of what lives at the same time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.ops.places import Life, placed, places_for

#: (bytes, first, more steps) of values; scratch has none.
_LIVES = st.lists(st.tuples(st.integers(1, 40).map(lambda n: 64 * n), st.integers(1, 12), st.integers(0, 5)),
                  min_size=1, max_size=25)  # fmt: skip


@settings(deadline=None)
@given(_LIVES, st.booleans())
def test_what_lives_at_once_does_not_overlap(drawn: list[tuple[int, int, int]], owned: bool) -> None:
    lives = {at: Life(size, first, first + more) for at, (size, first, more) in enumerate(drawn)}
    fixed = {0: 0} if owned else {}
    found = placed(
        sorted(lives.keys() - fixed.keys()), lives, fixed, {0: lives[0].nbytes} if owned else {}, 9
    )
    places, nbytes = found
    for a, one in lives.items():
        memory, offset = places[a]
        assert offset + one.nbytes <= (lives[0].nbytes if memory == 0 else nbytes) and not offset % 64
        for b, other in lives.items():
            if a < b and one.meets(other) and memory == places[b][0]:
                assert offset + one.nbytes <= places[b][1] or places[b][1] + other.nbytes <= offset


@given(_LIVES)
def test_little_more_is_taken_than_lives_at_once(drawn: list[tuple[int, int, int]]) -> None:
    lives = {at: Life(size, first, first + more) for at, (size, first, more) in enumerate(drawn)}
    found = places_for(lives, {}, 9)
    most = max(sum(size for size, first, more in drawn if first <= at <= first + more) for at in range(1, 18))
    assert found is None or found[1] <= 1.25 * most + 64
