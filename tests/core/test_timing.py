import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcompile.core import timing
from effcompile.core.timing import faster_half_median, have_settled, interleaved, median_seconds


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *durations: float):
        left = list(durations)

        def fn() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    monkeypatch.setattr(timing, "PATIENCE", 1.0)
    return clock


def test_median_ignores_warm_up_and_preemption(clock):
    assert median_seconds(
        clock.work(9.0, 1.0, 1.0, 7.0, 1.0, 8.0, 1.0), min_rounds=5, budget=0.0
    ) == pytest.approx(1.0)


def test_a_figure_that_has_settled_is_not_measured_on(clock):
    median_seconds(clock.work(0.01), min_rounds=2, budget=10.0, settled=0.02)
    assert clock.now == pytest.approx(0.01 * (2 + 8))
    # two that warm up, four and four samples
    falling = [0.04, 0.04, 0.04, 0.04, 0.04, 0.04, *[0.02] * 4, 0.01]
    clock.now = 0.0
    assert median_seconds(clock.work(*falling), min_rounds=2, budget=10.0, settled=0.02) == pytest.approx(
        0.01
    )
    assert clock.now < 1.0


def test_budget_bounds_the_rounds_but_not_below_the_minimum(clock):
    median_seconds(clock.work(1.0), min_rounds=6, budget=4.5)
    assert clock.now == pytest.approx(8.0)  # warm up, repeat probe, 6 samples
    before = clock.now
    median_seconds(clock.work(0.1), min_rounds=1, budget=1.0)
    assert 1.0 <= clock.now - before <= 1.5


def test_a_call_longer_than_the_budget_is_timed_three_times(clock):
    median_seconds(clock.work(1.0), min_rounds=9, budget=0.5)
    assert clock.now == pytest.approx(4.0)  # warm up, then three that count


def test_so_is_one_longer_than_a_quarter_of_it(clock):
    median_seconds(clock.work(1.0), min_rounds=9, budget=4.0)
    assert clock.now == pytest.approx(4.0)
    median_seconds(clock.work(1.0), min_rounds=5, budget=4.5)
    assert clock.now == pytest.approx(4.0 + 2.0 + 5.0)


def test_short_calls_are_repeated_within_a_sample(clock):
    calls = []

    def fn() -> None:
        calls.append(clock.now)
        clock.now += 1e-6

    assert median_seconds(fn, min_rounds=5, budget=0.0) == pytest.approx(1e-6)
    assert len(calls) >= 2 + 5 * 20


@given(st.lists(st.floats(1e-6, 1e3), min_size=1))
def test_faster_half_median_lies_between_minimum_and_median(samples):
    assert min(samples) <= faster_half_median(samples) <= sorted(samples)[len(samples) // 2]


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="No samples"):
        faster_half_median([])


def test_interleaved_rotates_and_attributes_the_time(clock):
    order = []

    def runner(name: str, seconds: float):
        def fn() -> None:
            order.append(name)
            clock.now += seconds

        return fn

    samples = interleaved({"a": runner("a", 2**-6), "b": runner("b", 2**-5), "c": runner("c", 2**-4)}, 3)
    assert {name: set(s) for name, s in samples.items()} == {"a": {2**-6}, "b": {2**-5}, "c": {2**-4}}
    assert {len(s) for s in samples.values()} == {6}
    assert [order[i] for i in (0, 9, 18)] == ["a", "b", "c"]


def test_a_long_call_does_not_warm_up_at_every_turn(clock):
    calls = []
    long, short = (
        lambda name=name, s=s: (calls.append(name), setattr(clock, "now", clock.now + s))
        for name, s in (("long", 1.0), ("", 2**-6))
    )
    samples = interleaved({"long": long, "short": short}, 3)
    assert len(samples["long"]) == len(samples["short"]) == 6
    assert calls.count("long") == 7 and calls.count("") == 9


def test_interleaved_of_nothing():
    assert interleaved({}, 3) == {}


def test_figures_have_settled_when_each_is_that_of_its_first_half():
    steady, falling = [1.0, 1.5, 1.01, 1.0], [1.0, 1.0, 0.5, 0.5]
    assert have_settled([steady]) and not have_settled([steady, falling])
    assert have_settled([falling], share=1.0)


def test_a_call_that_has_just_been_is_not_made_again(clock):
    assert median_seconds(clock.work(1.0), min_rounds=6, budget=4.5, warm=1.0) == pytest.approx(1.0)
    assert clock.now == pytest.approx(6.0)  # six samples
    clock.now = 0.0
    median_seconds(clock.work(1.0), min_rounds=9, budget=0.5, warm=1.0)
    assert clock.now == pytest.approx(2.0)  # and what was said: three that count
    calls = []
    median_seconds(lambda: calls.append("call"), min_rounds=3, budget=0.0, warm=1e-6)
    assert len(calls) == 3 * 20
