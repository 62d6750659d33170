"""A plan that was kept is the plan that solving anew would give, and is taken nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from train_helpers import gpt2

from effcompile.compiler import optimize_training
from effcompile.compiler.training import attempt, compile, known
from effcompile.core import effort
from effcompile.core.goal import Goal
from effcompile.estimate.operators import Measured
from effcompile.ir.plan import Plan
from effcompile.machine import busy_points
from effcompile.ops import fused
from effcompile.passes.training import pointwise
from effcompile.proof.training import agreed
from effcompile.search.training import figures, levers, operator_costs

BUDGET = 1_100_000  # of 2,235,400 that the step takes unplanned: chunks and recomputation


@pytest.fixture(autouse=True)
def kept(quick_training: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of this test's plans, which are kept however small their steps are."""
    monkeypatch.setattr(known, "LEAST_NODES", 0)
    # rates that were taken on a busy machine would be others in the next plan
    monkeypatch.setattr(busy_points, "without_busy", lambda calibration: None)
    monkeypatch.setattr(known, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compile, "lever_rows", levers.lever_rows)
    return tmp_path / "plans"


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every search."""
    runs, branches = list[str](), attempt.Branches.solve
    monkeypatch.setattr(attempt.Branches, "solve", lambda *args: runs.append("solved") or branches(*args))  # type: ignore[func-returns-value]
    return runs


def small(layers: int = 2, dropout: float = 0.1) -> tuple[nn.Module, dict[str, Any]]:
    """A GPT-2 with rows enough for chunks of its loss head."""
    model, _ = gpt2(layers, dropout, n_positions=64, vocab_size=512)
    ids = torch.randint(0, 512, (2, 64))
    return model, {"input_ids": ids, "labels": ids.clone()}


def plan(made: tuple[nn.Module, dict[str, Any]] | None = None, **asked: Any) -> Plan:
    model, batch = made or small()
    goal = Goal(mode="training", memory=asked.pop("memory", BUDGET), **asked.pop("goal", {}))
    return optimize_training(model, (), batch, goal=goal, **asked).plan


def told(notes: tuple[object, ...]) -> list[str]:
    return [str(note) for note in notes if not str(note).startswith(("not solved again", "peak of the host"))]


def test_the_same_question_is_answered_by_the_same_plan(solved: list[str], kept: Path) -> None:
    first = plan()
    assert solved == ["solved"] and first.levers
    again = plan()
    assert solved == ["solved"]
    assert any("not solved again: decided on 20" in str(note) for note in again.notes)
    (file,) = kept.iterdir()
    file.unlink()
    anew = plan()
    assert solved == ["solved"] * 2
    assert not any("not solved again" in str(note) for note in (*first.notes, *anew.notes))
    same = ("decisions", "declined", "predicted", "baseline", "levers", "guards", "inputs", "fingerprint",
            "memory_timeline", "target_line", "versions", "goal")  # fmt: skip
    for name in same:
        assert getattr(again, name) == getattr(anew, name), name
    proofs = [replace(each.certificate, seconds=0.0) for each in (first, again, anew)]
    assert proofs[0] == proofs[1] == proofs[2]
    assert sorted(told(again.notes)) == sorted(told(anew.notes))
    assert again.measured is not None and anew.measured is not None
    assert again.measured.peak_bytes == anew.measured.peak_bytes
    assert again.checks[0].name == anew.checks[0].name and again.met
    assert Plan.from_dict(again.to_dict()) == again


def test_what_comes_back_trains_as_the_model() -> None:
    plan()
    model, batch = small(dropout=0.0)
    plan((model, batch))
    twin, _ = small(dropout=0.0)
    goal = Goal(mode="training", memory=BUDGET)
    step = optimize_training(twin, (), batch, goal=goal)
    assert any("not solved again" in str(note) for note in step.plan.notes)
    twin.load_state_dict(model.state_dict())
    step(**batch).loss.backward()
    model(**batch).loss.backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_other_weights_are_no_other_question(solved: list[str]) -> None:
    """Nor is what the process did before: autograd has counted on since, and the step is captured anew."""
    plan()
    model, batch = small()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model(**batch).loss.backward()
    again = plan((model, batch))
    assert solved == ["solved"] and any("not solved again" in str(note) for note in again.notes)


def test_a_graph_within_a_graph_is_told_by_what_is_in_it(solved: list[str]) -> None:
    """The forward of every model with rotary positions has one: they are computed without gradients."""

    class Shifted(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.model, self.by = small()[0], by

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shift = torch.arange(64) * self.by
            inner = self.model.transformer(
                inputs_embeds=self.model.transformer.wte(input_ids) + shift[:, None]
            )
            logits = self.model.lm_head(inner.last_hidden_state)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    batch = small()[1]
    plan((Shifted(0.5), batch), memory=2_000_000)
    plan((Shifted(0.5), batch), memory=2_000_000)
    assert len(solved) == 1
    plan((Shifted(0.25), batch), memory=2_000_000)
    assert len(solved) == 2


def less_memory() -> dict[str, Any]:
    return {"memory": BUDGET - 50_000}


def least_memory() -> dict[str, Any]:
    return {"goal": {"minimize": "memory"}}


def other_passes() -> dict[str, Any]:
    return {"passes": ["no-pointwise"]}


def with_outputs() -> dict[str, Any]:
    return {"keep_outputs": True, "memory": 2_000_000}


@pytest.mark.parametrize("asked", [less_memory, least_memory, other_passes, with_outputs])
def test_another_question_is_solved(asked: Callable[[], dict[str, Any]], solved: list[str]) -> None:
    plan()
    plan(**asked())
    assert len(solved) == 2


def test_another_model_is_solved(solved: list[str]) -> None:
    plan()
    plan(small(dropout=0.0))
    plan(small(layers=3), memory=2_000_000)
    assert len(solved) == 3


def test_another_value_of_a_buffer_is_solved(solved: list[str]) -> None:
    """Passes read masks by their values."""

    def masked(value: float) -> tuple[nn.Module, dict[str, Any]]:
        model, batch = small()
        model.register_buffer("mask", torch.full((3,), value))
        return model, batch

    plan(masked(1.0))
    plan(masked(1.0))
    assert len(solved) == 1
    plan(masked(0.0))
    assert len(solved) == 2


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "own_code", lambda: "another release")


def more_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "is_high", lambda: True)


def other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SCHEDULE", "static")


def a_pass_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own = known.registered_for_training()
    monkeypatch.setattr(known, "registered_for_training", lambda: {**own, "theirs": object})


@pytest.mark.parametrize("changed", [other_code, more_effort, other_threads, a_pass_of_another_package])
def test_under_other_conditions_it_is_solved(
    changed: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, solved: list[str]
) -> None:
    plan()
    changed(monkeypatch)
    plan()
    assert len(solved) == 2


def test_by_other_prices_it_is_solved(solved: list[str]) -> None:
    """A price that the plan follows from is another today; one that it does not, is nothing to it."""
    plan()
    prices = figures.known_figures()
    prices["of another model"] = Measured(seconds=1.0, workspace=0)
    figures.keep_figures(prices)
    plan()
    assert len(solved) == 1
    others = {  # of other tests' steps, too
        name: Measured(seconds=2 * found.seconds, workspace=found.workspace)
        for name, found in prices.items()
        if name.startswith("aten.addmm")
    }
    figures.keep_figures({**prices, **others})
    plan()
    assert len(solved) == 2
    figures.keep_figures(prices)


def test_prices_of_a_busy_machine_keep_no_plan(
    solved: list[str], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan()
    (file,) = kept.iterdir()
    file.unlink()
    monkeypatch.setattr(operator_costs, "busy", lambda: "others")
    prices = figures.known_figures()
    figures.keep_figures({name: replace(found, busy=True) for name, found in prices.items()})
    plan()
    assert not list(kept.iterdir())
    figures.keep_figures(prices)


def test_a_file_that_somebody_changed_is_not_believed(solved: list[str], kept: Path) -> None:
    first = plan()
    (file,) = kept.iterdir()
    whole = msgspec.json.decode(file.read_bytes())
    for change in (
        {"plan": {}},
        {"priced": "0"},
        {"plan": {**whole["plan"], "predicted": {**whole["plan"]["predicted"], "peak_bytes": 1}}},
        {"plan": {**whole["plan"], "decisions": whole["plan"]["decisions"][1:]}},
    ):
        file.write_bytes(msgspec.json.encode({**whole, **change}))
        solved.clear()
        assert plan().predicted == first.predicted
        assert solved == ["solved"], change
    file.write_bytes(b"{")
    assert plan().predicted == first.predicted


def test_what_its_run_does_not_bear_out_is_priced_and_solved_again(
    solved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan()
    for where in (attempt, compile):
        monkeypatch.setattr(where, "busy", lambda: "")
    monkeypatch.setattr(Plan, "misjudged", property(lambda self: 9.0 if self.measured else None))
    again = plan()
    assert len(solved) >= 2 and not any("not solved again" in str(note) for note in again.notes)


def test_a_kept_comparison_is_of_the_kept_plan_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What runs is the same: the comparison of the first day is found by the second."""
    monkeypatch.setattr(agreed, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("effcompile.machine.room.Room.refusal", lambda self, more, whole: "needs 19 GiB")
    assert agreed.AGAIN not in plan().notes
    again = plan()
    assert agreed.AGAIN in again.notes and any("not solved again" in str(note) for note in again.notes)


@pytest.mark.parametrize("given", [False, True])
def test_kernels_are_built_before_the_step_is_timed(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that is kept, and of one that is given."""
    monkeypatch.setattr(pointwise, "_slow", lambda fusions, price: [])
    first = plan()
    monkeypatch.setattr(fused, "_compiled", {})
    made, asked = compile.runner_of, list[bool]()

    def runner_of(model: Any, case: Any, emitted: Any) -> Any:
        nodes = [*emitted.forward.nodes, *emitted.backward.nodes]
        kernels = [node.target for node in nodes if isinstance(node.target, fused.Fused)]
        asked.extend((kernel.digest, torch.get_num_threads()) in fused._compiled for kernel in kernels)
        return made(model, case, emitted)

    monkeypatch.setattr(compile, "runner_of", runner_of)
    if given:
        model, batch = small()
        optimize_training(model, (), batch, goal=first.goal, plan=first)
    else:
        plan()
    assert asked and all(asked)
