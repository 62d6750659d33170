"""Attention of a training step as one operator: what it is told of masks, its gradients, and the plan that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.capture.training import capture_training
from effcompile.passes import load_attention
from effcompile.passes.fused_attention import Attended, FusedAttention

WIDTH, HEADS = 32, 4
ALWAYS = ["attention.always=true"]


class Attends(nn.Module):
    """A residual self-attention as separate operators, with a mask input, and its loss. `drop`: of the weights."""

    def __init__(self, *, window: int = 0, drop: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window, self.drop = window, nn.Dropout(drop)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, HEADS)) if bias else None

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, -1))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        i, j = torch.arange(s)[:, None], torch.arange(s)
        if self.slopes is not None:
            scores = scores + self.slopes[:, None, None] * (j - i)
        seen = (j <= i) & attention_mask[:, None, None, :].bool()
        if self.window:
            seen = seen & (i - j < self.window)
        scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min)
        weights = self.drop(scores.softmax(-1))
        y = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, WIDTH))
        return (y * y).mean()


def inputs(s: int = 40) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(2, s, dtype=torch.long)
    mask[1, :7] = 0
    return {"x": torch.randn(2, s, WIDTH), "attention_mask": mask}


def fused(model: nn.Module) -> tuple[list[str], Attended]:
    """Names of the step's operators, and what the pass says that it did."""
    found: list[Attended] = []
    step = capture_training(model, (), inputs(), edit=lambda front, tensors: found.append(FusedAttention().fuse(front, tensors)))
    return [str(node.target) for node in step.graph.nodes if node.op == "call_function"], found[0]


def test_scores_are_gone_from_forward_and_backward() -> None:
    names, attended = fused(Attends(window=8).train())
    assert not [name for name in names if "softmax" in name]
    assert sorted(name for name in names if "effcompile" in name) == [
        "effcompile.attention.default",
        "effcompile.attention_backward.default",
    ]
    (text,) = attended.fused.values()
    assert text.startswith("causal ∧ window 8 ∧ padding")
    assert list(attended.score_bytes.values()) == [2 * HEADS * 40 * 40 * 4] and not attended.left


def test_a_bias_keeps_its_gradient() -> None:
    model = Attends(bias=True).train()
    executable = effcompile.optimize(model, inputs=inputs(), mode="training", passes=ALWAYS)
    (check,) = executable.plan.checks
    assert check.passed
    assert [d.option for d in executable.plan.decisions if d.kind == "attention"] == ["fused"]
    model.zero_grad()
    executable(**inputs()).backward()
    found = model.slopes.grad.clone()
    model.zero_grad()
    model(**inputs()).backward()
    torch.testing.assert_close(found, model.slopes.grad, rtol=1e-4, atol=1e-7)


def test_dropout_on_weights_is_left_and_said() -> None:
    plan = effcompile.plan(Attends(drop=0.5).train(), inputs=inputs(), mode="training")
    assert not [d for d in plan.decisions if d.kind == "attention"]
    names, attended = fused(Attends(drop=0.5).train())
    assert any("softmax" in name for name in names) and not attended.fused
    assert "drops 0.5 of its weights at random" in next(iter(attended.left.values()))


def test_a_saved_plan_is_carried_out_with_its_attention(tmp_path: Path) -> None:
    model = Attends(window=8).train()
    executable = effcompile.optimize(model, inputs=inputs(), mode="training", passes=ALWAYS)
    path = executable.plan.save(tmp_path / "plan.json")
    assert json.loads(Path(path or tmp_path / "plan.json").read_text())["schedule"]["attention"] == "fused"
    again = effcompile.optimize(model, inputs=inputs(), plan=tmp_path / "plan.json")
    assert all(check.passed for check in again.plan.checks)
    torch.testing.assert_close(again(**inputs()), executable(**inputs()))


@pytest.mark.parametrize("spec", [["no-attention"], ["attention.enabled=false"]], ids=str)
def test_it_can_be_left_out(spec: list[str]) -> None:
    assert load_attention(spec) is None and load_attention() == FusedAttention()
    plan = effcompile.plan(Attends().train(), inputs=inputs(), mode="training", passes=spec)
    assert not [d for d in plan.decisions if d.kind == "attention"]
