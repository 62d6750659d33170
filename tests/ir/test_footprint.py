"""The peak of a step against one instant after the other, laid out by hand."""

from hypothesis import given
from hypothesis import strategies as st

from effcompile.ir.footprint import GIVEN, GRADIENTS, KEPT, STATES, WORKING, Footprint, excess

SIZES = st.integers(0, 1000)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_peak_is_that_of_the_highest_instant(
    given_: int, kept: int, work: int, gradients: int, states: int, summed: int, update: int
) -> None:
    schedule = Footprint(
        step={GIVEN: given_, KEPT: kept, WORKING: work}, end={GIVEN: given_, GRADIENTS: gradients}
    )
    whole = (
        schedule
        + Footprint(resident={STATES: states}, working=update, host=3)
        + Footprint(resident={GRADIENTS: summed}, host=4)
    )
    instants = {
        "step": given_ + kept + work + states + summed,
        "update": given_ + gradients + states + summed + update,
    }
    assert whole.peak_bytes == max(instants.values()) == sum(whole.parts.values())
    assert whole.updating == (instants["update"] > instants["step"])
    assert whole.host == 7 and whole.parts[STATES] == states
    assert whole.room(5000) == max(5000 - states - summed, 1) and whole.room(None) is None


def test_what_is_not_known_exceeds_nothing() -> None:
    assert (excess(5, 4), excess(4, 4), excess(3, 4), excess(None, 4), excess(5, None)) == (1, 0, 0, 0, 0)
