"""Timings that wait until the machine runs as it can."""

from __future__ import annotations

import math

import pytest

from effcompile.core import pace as module
from effcompile.core import timing
from effcompile.core.pace import Pace, at_pace, current_pace


class Machine:
    """A clock of work: `slow` says for a time how many times as long everything takes."""

    def __init__(self, slow: list[tuple[float, float]]) -> None:
        self.now, self.slow = 0.0, slow

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        times = next((times for until, times in self.slow if self.now < until), 1.0)
        self.now += seconds * times

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def on(monkeypatch: pytest.MonkeyPatch, slow: list[tuple[float, float]]) -> Machine:
    machine = Machine(slow)
    for each in (module, timing):
        monkeypatch.setattr(each, "perf_counter", machine)
    monkeypatch.setattr(module, "sleep", machine.sleep)
    monkeypatch.setattr(timing, "PATIENCE", 1.0)
    return machine


def timed(machine: Machine, pace: Pace | None, seconds: float = 1e-3, **settings: float) -> float:
    with at_pace(pace):
        return timing.median_seconds(lambda: machine.work(seconds), **settings)  # type: ignore[arg-type]


def test_what_others_slow_down_is_measured_when_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [(0.5, 1.0), (2.0, 1.7)])
    pace = Pace(lambda: machine.work(5e-5))
    machine.now = 0.6
    assert timed(machine, None) == pytest.approx(1.7e-3)
    assert timed(machine, pace) == pytest.approx(1e-3)
    assert machine.now > 2.0 and 4.0 < pace.left < 8.0


def test_a_call_longer_than_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [(0.5, 1.0), (2.0, 1.7)])
    pace = Pace(lambda: machine.work(5e-5))
    machine.now = 0.6
    assert timed(machine, pace, 0.3, budget=0.1) == pytest.approx(0.3)


def test_what_begins_meanwhile_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [(0.05, 1.0), (1.0, 2.0)])
    assert timed(machine, Pace(lambda: machine.work(5e-5)), budget=0.3) == pytest.approx(1e-3)


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [(0.1, 1.0), (math.inf, 1.5)])
    pace = Pace(lambda: machine.work(5e-5), patience=2.0)
    machine.now = 0.2
    for _ in range(3):
        assert timed(machine, pace) == pytest.approx(1.5e-3)
    assert pace.left <= 0 and machine.now < 4.0
    assert pace.best == pytest.approx(5e-5), "it was so in this process"


def test_a_best_that_never_comes_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [])
    pace = Pace(lambda: machine.work(5e-5), best=2e-5, patience=1.0)
    assert timed(machine, pace) == pytest.approx(1e-3)
    assert pace.best == pytest.approx(5e-5)


def test_it_ends_with_its_block() -> None:
    assert current_pace() is None
    with at_pace(Pace(lambda: None)):
        assert current_pace() is not None
    assert current_pace() is None


def test_what_is_worth_little_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the patience is for others."""
    machine = on(monkeypatch, [(0.1, 1.0), (3.0, 1.5)])
    pace = Pace(lambda: machine.work(5e-5), patience=8.0)
    machine.now = 0.2
    with pace.losing(0.01):
        assert timed(machine, pace) == pytest.approx(1.5e-3)
    assert machine.now < 1.0 and 7.9 < pace.left < 8.0
    assert pace.best == pytest.approx(5e-5), "its patience is not at its end"
    assert timed(machine, pace) == pytest.approx(1e-3)
    assert machine.now > 3.0


def test_at_the_end_of_patience_nothing_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on(monkeypatch, [(0.1, 1.0), (math.inf, 1.5)])
    pace = Pace(lambda: machine.work(5e-5), patience=2.0)
    assert pace.surely_even()
    machine.now = 0.2
    assert not pace.surely_even()
    timed(machine, pace)
    assert pace.left <= 0 and pace.even() and not pace.surely_even()
