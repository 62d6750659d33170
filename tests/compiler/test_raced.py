"""A backend that clearly lost against another with the same plans is not built again; all else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.findings import NotBuilt
from effcompile.core.reasons import Because
from effcompile.ir.figures import Candidate
from effcompile.ir.plan import Plan
from effcompile.search.raced import WHILE_BUSY, Race

pytest.importorskip("onnxruntime")

NAMES = ("torch-eager", "onnxruntime")


@dataclass(frozen=True)
class Named:
    name: str


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    return effcompile.plan(Small().eval(), (torch.randn(4, 64),), backend="torch-eager")


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: Plan) -> Any:
    """Plans of two backends in an empty cache, and a function that runs a race of them."""
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    plans: Any = proposed(plan)

    @dataclass(frozen=True)
    class Asked:
        errors: tuple[float, ...] = ()
        here: bool = True
        goal: Any = plan.goal

        @property
        def sensitivity(self) -> Any:
            return self

        @property
        def machine(self) -> Any:
            return self

    class Errors(dict[tuple[str, str], float]):
        pass

    def race(
        first: str = "", error: float = 0.0, here: bool = True, other: Sequence[str] = (), unsolved: str = ""
    ) -> Race:
        search: Any = replace(Asked(), errors=Errors({("up", "int8"): error}), here=here)
        given = [
            (b, replace(p, fingerprint=p.fingerprint + first, decisions=p.decisions[b.name in other :]))
            for b, p in plans
            if b.name != unsolved
        ]
        return Race.of(search, given, [Candidate(backend=name, predicted_seconds=1.0) for name in NAMES])

    def ran(eager: float, ort: float) -> Any:
        took = dict(zip(NAMES, (eager, ort), strict=True))
        told = tuple(Candidate(backend=n, predicted_seconds=1.0, measured_seconds=s) for n, s in took.items())
        return replace(plan, candidates=told)

    return race, ran


def proposed(plan: Plan) -> Any:
    return [(Named(name), replace(plan, backend=name)) for name in NAMES]


def keep(race: Race, plan: Plan) -> None:
    race.keep(plan, proposed(plan))


def open_ones(race: Race) -> list[str]:
    return [backend.name for backend, _ in race.plans]


def test_what_lost_clearly_is_not_built_again_and_it_is_said(raced: Any) -> None:
    race, ran = raced
    assert open_ones(race()) == list(NAMES)  # nothing is known yet
    keep(race(), ran(1.0, 1.2))
    again = race()
    assert open_ones(again) == ["torch-eager"]
    note = again.candidates[1].note
    assert isinstance(note, Because) and note.figures[:2] == (1.2, 1.0)
    assert not isinstance(note, NotBuilt)  # running the best does not open it again
    assert again.candidates[0].note is None


@pytest.mark.parametrize(("others", "most"), [("", 1.0), ("others", WHILE_BUSY)])
def test_a_tie_is_settled_but_that_of_a_busy_minute_stays_open(
    raced: Any, others: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    race, ran = raced
    monkeypatch.setattr("effcompile.search.raced.busy", lambda: others)
    keep(race(), ran(most - 0.005, most - 0.005))
    assert open_ones(race()) == list(NAMES)
    keep(race(), ran(1.0, most - 0.005))
    assert open_ones(race()) == (list(NAMES) if others else list(NAMES[1:]))
    keep(race(), ran(1.0, most + 0.005))
    assert open_ones(race()) == list(NAMES[:1])


@pytest.mark.parametrize("change", [{"first": "another"}, {"error": 0.5}, {"here": False}])
def test_another_model_other_weights_and_another_machine_are_another_race(raced: Any, change: Any) -> None:
    race, ran = raced
    keep(race(), ran(1.0, 2.0))
    assert open_ones(race(**change)) == list(NAMES)


def test_a_backend_with_another_plan_is_open_again(raced: Any) -> None:
    race, ran = raced
    keep(race(), ran(1.0, 1.2))
    assert open_ones(race(other=["onnxruntime"])) == list(NAMES)
    assert open_ones(race(other=["torch-eager"])) == list(NAMES)  # what it lost against is no more
    assert race(other=["torch-eager"]).before == {"onnxruntime": 1.2}


def test_a_backend_that_is_not_solved_for_this_time_changes_nothing(raced: Any) -> None:
    """Whether one is priced beside others hangs on what was measured meanwhile."""
    race, ran = raced
    keep(race(unsolved="onnxruntime"), ran(1.0, 1.2))
    assert open_ones(race()) == ["torch-eager"]
    again = race(unsolved="onnxruntime")
    assert open_ones(again) == ["torch-eager"] and isinstance(again.candidates[1].note, Because)


def test_what_was_not_borne_out_or_not_timed_beside_another_is_not_kept(
    raced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    race, ran = raced
    one = ran(1.0, 2.0)
    keep(race(), replace(one, candidates=one.candidates[:1]))
    assert open_ones(race()) == list(NAMES)
    monkeypatch.setattr("effcompile.ir.plan.FAR_APART", 1.5)  # the suite's is wide
    far = replace(one.predicted, seconds=1e-3), replace(one.predicted, seconds=10.0)
    misjudged = replace(one, predicted=far[0], measured=far[1])
    assert misjudged.misjudged is not None
    keep(race(), misjudged)
    assert open_ones(race()) == list(NAMES)


def test_what_a_plan_took_is_the_least_that_was_seen(raced: Any) -> None:
    race, ran = raced
    plan = ran(1.0, 2.0)
    now = replace(plan, measured=replace(plan.predicted, seconds=1.1))
    assert race().took(now) == 1.1  # nothing is known yet
    keep(race(), replace(plan, candidates=plan.candidates[:1]))
    assert race().took(now) == 1.0 and race().took(replace(now, backend="onnxruntime")) == 1.1
    assert race().took(replace(now, measured=replace(now.measured, seconds=0.9))) == 0.9
    keep(race(), ran(1.0, 2.0))
    keep(race(), replace(plan, candidates=plan.candidates[:1]))  # what beat another is not forgotten
    assert open_ones(race()) == ["torch-eager"]


def test_what_is_as_fast_as_before_is_not_looked_at_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from effcompile.compiler import measure

    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr("effcompile.ir.plan.Plan.misjudged", None)
    looks, asked, took = list[float](), list[float](), iter([1.0, 1.2, 0.9])

    def compared(program: Any, model: Any, outcomes: Any) -> dict[str, float]:
        looks.append(next(took))
        return {"original": 1.0, "torch-eager": looks[-1]}

    def undecided(plans: Any, told: Any, seconds: float) -> list[Any]:
        asked.append(seconds)
        return []

    monkeypatch.setattr(measure, "compare", compared)
    monkeypatch.setattr("effcompile.compiler.compile.undecided", undecided)
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 64)
    plans = [effcompile.optimize(model, (x,), backend="torch-eager").plan for _ in range(3)]
    assert looks == [1.0, 1.2, 0.9] and sorted(set(asked)) == [0.9, 1.0]
    assert [plan.seconds_measured for plan in plans] == looks  # what is told is of the run


def test_a_file_that_is_none_of_ours_is_not_believed(raced: Any) -> None:
    race, ran = raced
    keep(race(), ran(1.0, 2.0))
    race().path.write_text('{"seconds": {"onnxruntime": -1}, "day": 3}')
    assert open_ones(race()) == list(NAMES)


def test_a_second_run_builds_the_best_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from effcompile.compiler import measure

    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr("effcompile.compiler.compile.SHORTLIST", 1e6)
    built: list[list[str]] = []
    took = {"original": 1.0, "torch-eager": 1.0, "torch-inductor": 3.0, "onnxruntime": 3.0}

    def compared(program: Any, model: Any, outcomes: Any) -> dict[str, float]:
        built.append(sorted(each.plan.backend for each in outcomes))
        return {name: took[name] for name in ("original", *built[-1])}

    monkeypatch.setattr(measure, "compare", compared)
    # what a run of milliseconds is predicted to take says nothing of these figures
    monkeypatch.setattr("effcompile.ir.plan.Plan.misjudged", None)
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 64)
    first = effcompile.optimize(model, (x,)).plan
    runs = len(built)
    second = effcompile.optimize(model, (x,))
    assert len(built[runs - 1]) > 1 and built[runs:] == [["torch-eager"]] * len(built[runs:]) != []
    assert first.backend == second.plan.backend == "torch-eager"
    assert second.plan.checks and all(check.passed for check in second.plan.checks)
    torch.testing.assert_close(second(x), model(x), rtol=1e-4, atol=1e-5)
