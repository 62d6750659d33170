"""What the steps of a plan took before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from effcompile.compiler import optimize_training
from effcompile.core.goal import Goal
from effcompile.proof.training import confirm, kept


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_what_the_steps_of_a_plan_took_is_known_to_the_same_plan_alone(
    quick_training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    goal, inputs = Goal(mode="training"), {"x": torch.ones(4, 8)}
    plan = optimize_training(Squares(), (), inputs, goal=goal, passes=["checkpoint"]).plan
    assert plan.decisions
    assert kept.known_times(plan) == kept.KeptTimes()
    kept.keep_times(plan, 0.5, None)
    assert kept.known_times(plan) == kept.KeptTimes(), "what is short is timed each time"
    kept.keep_times(plan, 6.5, None)
    assert kept.known_times(plan) == kept.KeptTimes(planned=6.5)
    for other in (
        replace(plan, fingerprint="another step"),
        replace(plan, decisions=plan.decisions[1:]),
        replace(plan, versions={**plan.versions, "torch": "0"}),
    ):
        assert kept.known_times(other) == kept.KeptTimes()
    monkeypatch.setattr(kept, "this_hardware", lambda: "another machine")
    assert kept.known_times(plan) == kept.KeptTimes()
    monkeypatch.undo()
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    assert kept.known_times(plan).planned == 6.5
    (written,) = (tmp_path / "steps").glob("*.json")
    written.write_text('{"planned": -1}')
    assert kept.known_times(plan) == kept.KeptTimes(), "what no clock says"


def test_a_step_that_took_seconds_is_known_to_the_next_request(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foretold = []

    def timed(*_: object, **told: object) -> tuple[float, float]:
        foretold.append(told["foretold"])
        return 6.5, 5.5

    monkeypatch.setattr(confirm, "timed", timed)
    for _ in range(2):
        goal, inputs = Goal(mode="training"), {"x": torch.ones(4, 8)}
        optimize_training(Squares(), (), inputs, goal=goal, passes=["checkpoint"])
    (ours, own), (ours_then, own_then) = foretold[0], foretold[-1]
    assert ours[0] is None and own[0] is None
    assert (ours_then[0], own_then[0]) == (6.5, 5.5)
