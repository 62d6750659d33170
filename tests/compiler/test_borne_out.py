"""Times that are far off are measured again, then priced and solved again; what stays off is said beside the
proof.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import effcompile
from effcompile.compiler import borne_out as borne_out_module
from effcompile.compiler import compile as compile_module
from effcompile.compiler.borne_out import confirmed
from effcompile.compiler.settle import Outcome
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Plan
from effcompile.report.figures import borne_out


@pytest.fixture(autouse=True)
def _far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcompile.ir.plan.FAR_APART", 1.5)
    monkeypatch.setattr(borne_out_module, "busy", lambda: "")


def outcome(
    predicted: float, measured: float, original: float = 1.0, note: str = "", backend: str = "torch-eager"
) -> Outcome:
    certificate = Certificate(
        status="optimal within gap",
        objective=1.0,
        bound=1.0,
        gap=0.0,
        sites=0,
        alternatives=0,
        seconds=0.0,
        solver="z3",
    )
    plan = Plan(
        model="Net", fingerprint="", parameters=0, goal=Goal(), target="this machine", target_line="",
        backend=backend, decisions=(), declined=(), certificate=certificate, baseline=Totals(),
        predicted=Totals(seconds=predicted), measured=Totals(seconds=measured),
        measured_baseline=Totals(seconds=original), notes=(Because(note),) if note else (),
    )  # fmt: skip
    return Outcome(plan=plan, program=cast("Any", None), lowered=cast("Any", None), checks=())


def never(plan: Plan | None = None) -> Outcome:
    raise AssertionError("not asked for")


def in_turn(*found: Outcome) -> Callable[[], Outcome]:
    """What is measured first, second ...; no more often."""
    return iter(found).__next__


@pytest.mark.parametrize(
    ("predicted", "measured"), [(0.1, 0.1), (0.1, 0.14), (0.14, 0.1), (1e-4, 4e-3), (4e-3, 1e-4)]
)
def test_times_that_agree_are_taken_as_they_are(predicted: float, measured: float) -> None:
    """Differences of a few milliseconds are those of a call in Python."""
    best = outcome(predicted, measured)
    assert confirmed(in_turn(best), never, never) is best and borne_out(best.plan) == []


@pytest.mark.parametrize(("predicted", "measured"), [(0.012, 0.1), (0.1, 0.012)])
def test_a_busy_minute_of_measuring_is_measured_again(predicted: float, measured: float) -> None:
    found = confirmed(
        in_turn(outcome(predicted, measured), outcome(predicted, predicted * 1.1)), never, never
    )
    assert found.plan.misjudged is None
    assert any("measured again" in str(note) for note in found.plan.notes)


@pytest.mark.parametrize(("second", "share"), [(0.3, 0.3), (0.6, 0.5)])
def test_prices_of_another_minute_are_taken_again_and_the_faster_plan_stays(
    second: float, share: float
) -> None:
    """Each in units of the original that was timed beside it: the machine may be slower by now."""
    first = outcome(4.0, 1.0, original=2.0, note="first")
    other = outcome(2 * second, 2 * second, original=2.0, note="second", backend="openvino")
    found = confirmed(in_turn(first, first), in_turn(other), lambda plan: replace(first, plan=plan))
    assert found.plan.measured is not None and found.plan.measured.seconds == 2 * share
    assert {Because("first"), Because("second")} <= set(found.plan.notes)
    assert any("timed and the plan solved again" in str(note) for note in found.plan.notes)


def test_nothing_is_solved_again_while_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borne_out_module, "busy", lambda: "load 7.0 on 2 cores")
    found = confirmed(in_turn(outcome(4.0, 1.0), outcome(4.0, 1.1)), never, never)
    assert found.plan.measured is not None and found.plan.measured.seconds == 1.1
    assert any("the machine is busy: load 7.0 on 2 cores" in str(note) for note in found.plan.notes)


def test_the_same_plan_is_taken_with_its_new_prices() -> None:
    found = confirmed(in_turn(outcome(4.0, 1.0), outcome(4.0, 1.0)), in_turn(outcome(1.1, 1.05)), never)
    assert found.plan.predicted.seconds == 1.1 and found.plan.misjudged is None


def test_what_stays_off_is_said_beside_the_proof() -> None:
    off = outcome(0.012, 0.1)
    found = confirmed(in_turn(off, off), in_turn(off), never)
    (line,) = borne_out(found.plan)
    assert line.startswith("predicted ÷ measured time is 0.12") and "does not bear out" in line


@pytest.mark.parametrize(("shares", "stays"), [([2.0, 1.0], False), ([1.0, 2.0], True)])
def test_what_is_not_chosen_again_is_let_go_of_before_another_is_built(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], stays: bool
) -> None:
    """Two lowered models, one beside the other, are more than planning may take; the first is built again
    where it is the faster one.
    """
    made: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []
    settle, share = compile_module.settle, iter(shares).__next__

    def watched(*args: Any, **named: Any) -> Outcome:
        gc.collect()
        alive.append([ref() is not None for ref in made])
        outcome = settle(*args, **named)
        made.append(weakref.ref(outcome.lowered))
        return outcome

    monkeypatch.setattr(compile_module, "settle", watched)
    monkeypatch.setattr(Plan, "misjudged", 9.9)
    monkeypatch.setattr(Plan, "same_choices", lambda self, other: False)
    monkeypatch.setattr(borne_out_module, "_share", lambda plan: share())
    x = torch.randn(2, 8)
    model = torch.nn.Linear(8, 4).eval()
    planned = effcompile.optimize(model, inputs=(x,), backend="torch-eager")
    assert alive == [[], [False], [False, False]][: 3 if stays else 2]
    assert made[-1]() is not None
    torch.testing.assert_close(planned(x), model(x))
    assert any(
        ("the first plan is faster, and stays" in str(note)) is stays
        for note in planned.plan.notes
        if "solved again" in str(note)
    )
