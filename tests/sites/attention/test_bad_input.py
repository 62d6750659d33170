"""Inputs at the edges of what kernels take, through the whole path: right, a reasoned fall-back or an error;
never a wrong number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.core.errors import EffcompileError, GuardError
from effcompile.machine.target import KernelCall
from effcompile.report.reasons import words

HEADS = 2


class Attends(nn.Module):
    """Causal, padded, eager attention with heads of any size.

    `mixed`: queries and keys in bf16, values in fp32.
    """

    def __init__(self, size: int, *, mixed: bool = False) -> None:
        super().__init__()
        self.size, self.mixed = size, mixed
        self.project, self.out = nn.Linear(8, 3 * HEADS * size), nn.Linear(HEADS * size, 8)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, self.size).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if self.mixed:
            q, k = q.bfloat16(), k.bfloat16()
        scores = q @ k.transpose(-1, -2) * self.size**-0.5
        seen = (torch.arange(s)[:, None] >= torch.arange(s)) & attention_mask[:, None, None, :].bool()
        scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, HEADS * self.size))


def inputs(b: int = 2, s: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(b, s, dtype=torch.long)
    mask[1:, :3] = 0
    return {"x": torch.randn(b, s, 8), "attention_mask": mask}


def optimized(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The attention that knows its mask is made to seem free."""

    def measure(_: Any, call: KernelCall) -> float | None:
        return 1e-9 if call.kernel.startswith("attention/tiled") else 1e-2

    monkeypatch.setattr(TorchEager, "measure", measure)
    return effcompile.optimize(model.eval(), inputs=inputs(), backend="torch-eager")


def agrees(executable: Any, model: nn.Module, given: dict[str, Tensor]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(executable(**given), model(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [7, 300])
def test_any_size_of_head(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends(size)
    executable = optimized(model, monkeypatch)
    assert [d.applied for d in executable.plan.decisions if d.kind == "attention"] == ["tiled"]
    agrees(executable, model, inputs(s=17))


def sized(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, length, 8), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def test_strides_masks_and_lengths_of_a_call_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends(4)
    executable = optimized(model, monkeypatch)
    given = inputs()
    assert [d.applied for d in executable.plan.decisions if d.kind == "attention"] == ["tiled"]
    strided = {
        "x": torch.randn(8, 12, 2).permute(2, 1, 0),
        "attention_mask": torch.ones(12, 4, dtype=torch.long).mT[::2],
    }
    assert not strided["x"].is_contiguous() and not strided["attention_mask"].is_contiguous()
    agrees(executable, model, strided)
    agrees(executable, model, {**given, "attention_mask": given["attention_mask"].flip(1)})
    agrees(executable, model, {**given, "attention_mask": torch.zeros_like(given["attention_mask"])})
    agrees(executable, model, sized(3, 1))
    for empty in (sized(2, 0), sized(0, 5)):
        with pytest.raises(GuardError, match="no axis of it empty"):
            executable(**empty)


def test_mixed_dtypes_stay_within_the_limit_or_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads all in fp32 does not round scores to bf16 as this model does: too exact to be
    equal.
    """
    model = Attends(4, mixed=True)
    executable = optimized(model, monkeypatch)
    assert not [d for d in executable.plan.decisions if d.kind == "attention"]
    assert any(
        "rounds otherwise" in words(d.reason) for d in executable.plan.declined if d.kind == "attention"
    )
    agrees(executable, model, inputs())


def test_operands_that_do_not_fit_are_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = optimized(Attends(4), monkeypatch)
    with pytest.raises(EffcompileError, match="x"):
        executable(x=torch.randn(2, 12, 9), attention_mask=torch.ones(2, 12, dtype=torch.long))
