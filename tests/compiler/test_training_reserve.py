"""16-bit products as they are given, in reserve behind those in fp32: taken up where nothing else is within
the budget, and only there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effcompile import InfeasibleError, optimize, plan
from effcompile.core import torch_compat_memory
from effcompile.passes.training import wide
from effcompile.passes.training.wide import KIND, NARROW, WIDE
from effcompile.report.reasons import words
from effcompile.search.training.work import Work

WIDTH, ROWS = 16, 12


class Net(nn.Module):
    """A product in bf16 at whose gradients the step is largest: what they take in fp32 stands beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x + self.narrow(x.bfloat16()).float()), y)


@pytest.fixture(autouse=True)
def _slow_products(quick_training: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcompile.ops.wide.product_ratio", lambda dtype, device: 30.0)
    monkeypatch.setattr(wide, "product_ratio", lambda dtype, device: 30.0)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what is in reserve was asked for, of each preparation."""
    seen: list[bool] = []
    real = Work.prepare

    def watched(self: Work, case: Any, *, reserve: bool = False) -> Any:
        seen.append(reserve)
        return real(self, case, reserve=reserve)

    monkeypatch.setattr(Work, "prepare", watched)
    return seen


def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, 4, (ROWS,))}


def peak(model: nn.Module, run: Any, batch: dict[str, Tensor]) -> int:
    """The model, its inputs, and what the allocator gave out in a second step of its gradients."""
    there = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *batch.values()))
    run(**batch).backward()
    model.zero_grad(set_to_none=True)
    with torch_compat_memory.memory_profile() as record:
        run(**batch).backward()
    model.zero_grad(set_to_none=True)
    return there + torch_compat_memory.peak_of_memory_events(record)


def test_eagers_bytes_are_enough_and_are_kept(prepared: list[bool]) -> None:
    model, batch = made()
    eager = peak(model, model, batch)
    with pytest.raises(InfeasibleError) as refused:
        plan(model, batch, mode="training", memory=1)
    least = int(refused.value.nearest["memory"])
    assert least <= eager and prepared == [False, True]
    planned = optimize(model, inputs=batch, mode="training", memory=least)
    decision = next(d for d in planned.plan.decisions if d.kind == KIND)
    assert decision.option == NARROW == decision.baseline and "nothing is within the budget" in words(
        decision.why
    )
    assert peak(model, planned, batch) <= least
    # carried out again as it is
    assert optimize(model, inputs=batch, plan=planned.plan).plan.predicted.peak_bytes <= least


@pytest.mark.parametrize("asked", [{}, {"memory": "1MiB"}, {"minimize": "memory"}])
def test_a_budget_that_fp32_is_within_leaves_the_reserve_alone(
    prepared: list[bool], asked: dict[str, Any]
) -> None:
    model, batch = made()
    found = plan(model, batch, mode="training", **asked)
    assert next(d.option for d in found.decisions if d.kind == KIND) == WIDE
    assert prepared == [False]


def test_what_is_left_out_has_nothing_in_reserve(prepared: list[bool]) -> None:
    model, batch = made()
    with pytest.raises(InfeasibleError):
        plan(model, batch, mode="training", memory=1, passes=["no-wide"])
    assert prepared == [False]
