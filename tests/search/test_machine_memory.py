"""A plan never needs more memory than its machine has, whatever the goal says or leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from effcompile import InfeasibleError, frontier, plan
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target
from effcompile.search.training.fit import limit


def small(memory: int) -> Target:
    return replace(load_target("cpu-generic"), name="tiny-device", memory_bytes=memory)


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))  # 1 MiB of weights, 0.26 in 8 bits


X = torch.randn(8, 256)


@pytest.mark.parametrize("allowed", [None, "2GiB"])
def test_an_inference_plan_that_the_machine_cannot_hold_is_refused_in_words(allowed: str | None) -> None:
    with pytest.raises(InfeasibleError, match="tiny-device has 500") as refused:
        plan(linears(), X, target=small(500 * 2**10), memory=allowed)
    assert "larger machine" in str(refused.value)
    assert "memory" not in refused.value.nearest  # to ask for more of what there is not is no remedy


def test_the_machines_memory_is_a_limit_that_the_solver_meets() -> None:
    room = 700 * 2**10
    found = plan(linears(), X, target=small(room), max_error=0.1, backend="onnxruntime")
    assert found.predicted.peak_bytes is not None and found.predicted.peak_bytes <= room
    assert found.goal.memory is None  # the user did not ask for it
    assert any(d.option != "fp32" for d in found.decisions if d.kind == "linear")
    assert (
        max(p.predicted.peak_bytes or 0 for p in frontier(linears(), X, target=small(room), max_error=0.1))
        <= room
    )


def test_where_there_is_room_nothing_is_limited() -> None:
    found = plan(linears(), X, target=small(2**30))
    assert found.predicted.peak_bytes is not None and found.predicted.peak_bytes > 2**20


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.mark.parametrize("allowed", [None, "2GiB"])
def test_a_training_plan_too(allowed: str | None) -> None:
    with pytest.raises(InfeasibleError, match=r"tiny-device has 1\.5"):
        plan(Loss(), X, mode="training", target=small(3 * 2**19), memory=allowed)
    found = plan(Loss(), X, mode="training", target=small(2**23), memory=allowed)
    assert found.peak_bytes is not None and found.peak_bytes <= 2**23


def test_what_fits_here_has_the_users_limit_and_no_other() -> None:
    target = small(100)
    assert limit(None, 90, target) is None and limit(95, 90, target) == 95 and limit(200, 90, target) == 200
    assert limit(None, 110, target) == 100 and limit(95, 110, target) == 95 and limit(200, 110, target) == 100
