"""A model in 16 bits on a processor that has no such products: its own linears are made in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import effcompile
from effcompile.ops import wide

TOLD = "16-bit linears"


class Model(nn.Module):
    """Two linears, one of them with another one's rows turned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that is made in fp32."""
    rows, made = list[int](), wide.mm_into

    def mm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **more: object) -> torch.Tensor:
        rows.append(len(a))
        return made(out, a, b, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(wide, "mm_into", mm_into)
    monkeypatch.setattr(wide, "pays", lambda dtype, device: dtype is torch.bfloat16 and device == "cpu")
    return rows


def test_linears_are_widened_where_rows_are_many(counted: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model().eval().bfloat16()
    x = torch.randn(3, 16, 24).bfloat16()
    planned = effcompile.optimize(model, inputs=(x,), backend="torch-eager")
    assert planned.plan.settings[TOLD] == "fp32, rounded once"
    planned.save(tmp_path / "out")
    loaded = effcompile.load(tmp_path / "out")
    for call in (planned, loaded):
        counted.clear()
        with torch.no_grad():
            right = model(x)
            torch.testing.assert_close(call(x), right)
        assert counted == [48, 48]
        call(torch.randn(1, 4, 24).bfloat16())
        assert len(counted) == 2


def test_they_are_not_where_the_goal_is_a_memory(counted: list[int]) -> None:
    planned = effcompile.optimize(
        Model().eval().bfloat16(), inputs=(torch.randn(3, 16, 24).bfloat16(),), backend="torch-eager",
        memory="1GiB",
    )  # fmt: skip
    assert TOLD not in planned.plan.settings and not counted


def test_models_in_fp32_are_as_they_were(counted: list[int]) -> None:
    planned = effcompile.optimize(Model().eval(), inputs=(torch.randn(3, 16, 24),), backend="torch-eager")
    assert TOLD not in planned.plan.settings and not counted
