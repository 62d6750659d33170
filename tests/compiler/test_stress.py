"""How the error moves off calibration is printed, and limited where the goal is robust."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from effcompile import Plan, UsageError, VerificationError, optimize
from effcompile.capture import capture
from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.estimate.inputs import stress_inputs

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
STRESSES = ["scaled ×100", "one outlier channel ×100", "zeros"]


class Net(nn.Module):
    """With an attention-like softmax, so that a hundred times the input is not a hundred times the output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.softmax(self.up(x), -1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_stress_inputs_change_data_and_nothing_else() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)

        def forward(self, ids: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.embedding(ids) + x) * mask[..., None]

    ids, x, mask = torch.randint(1, 10, (2, 3)), torch.randn(2, 3, 4), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    found = {name: args for name, args, _ in stress_inputs(capture(Masked(), (ids, x, mask), {}))}
    assert list(found) == STRESSES
    assert all(torch.equal(args[2], mask) for args in found.values())
    scaled, outlier, zeros = found.values()
    assert torch.equal(scaled[0], ids) and torch.equal(scaled[1], 100 * x)
    assert torch.equal(outlier[1][..., 1:], x[..., 1:]) and torch.equal(outlier[1][..., 0], 100 * x[..., 0])
    assert not zeros[0].any() and not zeros[1].any()


def test_the_error_under_stress_is_measured_and_printed(tmp_path: Path) -> None:
    model = net()
    planned = optimize(model, inputs=X, max_error=0.05, target="cpu-generic", backend="onnxruntime")
    plan = planned.plan
    assert [check.name for check in plan.stress] == STRESSES and plan.met
    with torch.no_grad():
        assert plan.stress[0].error == pytest.approx(relative(planned(100 * X), model(100 * X)), rel=1e-3)
    text = io.StringIO()
    plan.report(Console(file=text, width=140))
    assert all(name in text.getvalue() for name in STRESSES)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stress == plan.stress


def test_a_robust_goal_holds_under_stress_or_says_that_it_cannot() -> None:
    model = net()
    try:
        planned = optimize(
            model, inputs=X, max_error=0.05, robust=True, target="cpu-generic", backend="onnxruntime"
        )
    except (VerificationError, InfeasibleError) as refused:
        pytest.fail(f"exact options are always left: {refused}")
    checks = {check.name: check for check in planned.plan.checks}
    assert set(STRESSES) <= set(checks) and planned.plan.met and not planned.plan.stress
    with torch.no_grad():
        assert relative(planned(100 * X), model(100 * X)) <= 0.05
    assert "under stress inputs too" in planned.plan.goal.describe()


def test_exact_plans_have_no_error_to_watch() -> None:
    assert optimize(net(), inputs=X, target="cpu-generic", backend="onnxruntime").plan.stress == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"robust": 1}, "True or False"), ({"robust": True, "mode": "training"}, "is for inference")],
)
def test_what_robust_does_not_take(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Goal.of(**fields)
