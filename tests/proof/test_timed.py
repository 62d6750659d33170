"""How often a step is run to be timed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from effcompile.proof import spool as spooled
from effcompile.proof.training import timed as timing
from effcompile.proof.training import verify


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which step was run, each in 4 seconds of planned and 3 of the original."""
    made: list[str] = []

    def seconds(step: Any, *_: object) -> float:
        made.append(step())
        return {"ours": 4.0, "eager": 3.0}[made[-1]]

    monkeypatch.setattr(verify, "seconds", seconds)
    monkeypatch.setattr(timing, "_TIMING_SECONDS", 20.0)
    return made


def timed(
    found: float, original: float | None, *predicted: float | None, before: tuple[float, float] | None = None
) -> tuple[float, float]:
    work: Any = SimpleNamespace(model=None, leaves={}, eager_loss=lambda: "eager")
    runner: Any = SimpleNamespace()
    ran = [
        None
        if each is None
        else verify.Result(loss=torch.zeros(()), gradients={}, peak_bytes=None, seconds=each)
        for each in (found, original)
    ]
    assert ran[0] is not None
    step: Any = lambda: "ours"  # noqa: E731
    ours, own = zip(*filter(None, (before, predicted)), strict=True) if before or predicted else ((), ())
    return timing.timed(work, runner, step, ran[0], None, together=ran[1], foretold=(ours, own))


def test_a_step_of_seconds_was_timed_while_it_was_watched(runs: list[str]) -> None:
    assert timed(4.1, None) == (4.0, 0.0)
    assert runs == ["ours"]


def test_it_is_run_again_where_watching_slowed_it(runs: list[str]) -> None:
    assert timed(6.0, 3.0) == (4.0, 3.0)
    assert runs == ["ours", "eager", "ours", "eager"]


def test_one_that_stands_alone_is_not_run_again_where_it_is_believed(runs: list[str]) -> None:
    assert timed(5.8, None, 4.0, None) == (5.8, 0.0)
    assert runs == []
    assert timed(6.2, None, 4.0, None) == (4.0, 0.0)  # which would have it solved again
    assert timed(4.1, None, 5.0, None) == (4.0, 0.0)  # faster than predicted: it might be by more
    assert timed(5.8, 3.0, 4.0, 3.0) == (4.0, 3.0)  # beside the original the difference counts
    assert runs == ["ours", "ours", "ours", "eager"]


def test_a_short_step_is_timed_unwatched(runs: list[str]) -> None:
    assert timed(0.5, 0.5) == (4.0, 3.0)
    assert runs == ["ours", "eager"] * 2


def test_one_that_takes_what_was_predicted_is_not_run_again(runs: list[str]) -> None:
    assert timed(4.3, None, 4.0, None) == (4.3, 0.0)
    assert timed(4.3, 3.1, 4.0, 3.0) == (4.3, 3.1)
    assert runs == []
    assert timed(4.3, 3.9, 4.0, 3.0) == (4.0, 3.0)
    assert runs == ["ours", "eager"]
    assert timed(0.5, None, 0.5, None) == (4.0, 0.0)
    assert len(runs) == 4


def test_one_that_takes_what_it_took_before_is_not_run_again(runs: list[str]) -> None:
    assert timed(6.0, 6.0, 4.0, 3.0, before=(6.2, 5.8)) == (6.0, 6.0)
    assert runs == []
    assert timed(6.0, 6.0, 4.0, 3.0, before=(6.2, 3.0)) == (4.0, 3.0)
    assert runs == ["ours", "eager"]


def test_what_puts_gradients_aside_is_not_the_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    write = os.pwrite

    def slow(file: int, view: memoryview, at: int) -> int:
        clock[0] += 100.0
        return write(file, view, at)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(spooled, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(verify, "perf_counter", lambda: clock[0])
    model, spool = torch.nn.Linear(2, 2), spooled.Spool()

    def step() -> torch.Tensor:
        clock[0] += 3.0
        spool.put("weight", torch.ones(2, 2))
        return model(torch.ones(1, 2)).sum()

    ran = [verify.run(step, model, spool=spool).seconds for _ in range(2)]  # a loss scale comes down
    assert ran == [pytest.approx(3.0)] * 2
    assert clock[0] > 200.0
