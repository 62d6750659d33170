"""Attention of a training step as one operator: what it is told of masks, its gradients, and the plan that
says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import effcompile
from effcompile.capture.training import capture_training
from effcompile.passes.training.fused_attention import Attended, FusedAttention
from effcompile.report.masks import mask_words
from effcompile.report.reasons import words

WIDTH, HEADS = 32, 4
ALWAYS = ["attention.always=true"]


class Attends(nn.Module):
    """A residual self-attention as separate operators, with a mask input, and its loss.

    `drop`: of the weights.
    """

    def __init__(self, *, window: int = 0, drop: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window, self.drop = window, nn.Dropout(drop)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, HEADS)) if bias else None

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, -1))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        i, j = torch.arange(s, device=x.device)[:, None], torch.arange(s, device=x.device)
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
    step = capture_training(
        model, (), inputs(), edit=lambda front, tensors: found.append(FusedAttention().fuse(front, tensors))
    )
    return [str(node.target) for node in step.graph.nodes if node.op == "call_function"], found[0]


def test_scores_are_gone_from_forward_and_backward() -> None:
    names, attended = fused(Attends(window=8).train())
    assert not [name for name in names if "softmax" in name]
    assert sorted(name for name in names if "effcompile" in name) == [
        "effcompile.attention.default",
        "effcompile.attention_backward.default",
    ]
    (mask,) = attended.fused.values()
    assert mask_words(mask).startswith("causal ∧ window 8 ∧ padding")
    assert list(attended.score_bytes.values()) == [2 * HEADS * 40 * 40 * 4] and not attended.left


def test_masks_are_understood_without_data_too() -> None:
    """A plan for a GPU that is not here, of a model that is nowhere, has the attention that the same model
    has with its weights.
    """
    asked = {"mode": "training", "target": "h100-sxm", "passes": ALWAYS}
    plans = [
        effcompile.plan(
            Attends(window=8).to(device).train(), {k: v.to(device) for k, v in inputs().items()}, **asked
        )
        for device in ("cpu", "meta")
    ]
    (here, nowhere) = (
        [(d.site, d.option, d.note) for d in plan.decisions if d.kind == "attention"] for plan in plans
    )
    assert here == nowhere and here[0][1] == "fused"
    assert plans[0].predicted == plans[1].predicted


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
    (declined,) = (d for d in plan.declined if d.kind == "attention")
    assert (
        declined.option == "fused"
        and "drops 0.5 of its weights at random, and no other kernel would draw the same"
        in words(declined.reason)
    )
    names, attended = fused(Attends(drop=0.5).train())
    assert any("softmax" in name for name in names) and not attended.fused
    assert "drops 0.5 of its weights at random" in str(next(iter(attended.left.values())))


class Drops(nn.Module):
    """SDPA as written, with dropout of its own and a mask that is known in closed form; and a second
    attention, eager, without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project, self.plain = nn.Linear(WIDTH, WIDTH), Attends()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.project(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        h = torch.nn.functional.scaled_dot_product_attention(h, h, h, seen, dropout_p=0.25)
        return self.plain(h.transpose(1, 2).flatten(2), attention_mask)


def test_dropout_of_sdpa_is_kept_and_said() -> None:
    model = Drops().train()
    executable = effcompile.optimize(model, inputs=inputs(), mode="training", passes=ALWAYS)
    assert [(d.site, d.option) for d in executable.plan.decisions if d.kind == "attention"] == [
        ("plain:attention", "fused")
    ]
    (declined,) = (d for d in executable.plan.declined if d.kind == "attention")
    assert "drops 0.25 of its weights" in words(declined.reason)
    given = inputs()
    torch.manual_seed(3)
    found = executable(**given)
    torch.manual_seed(3)
    torch.testing.assert_close(found, model(**given))
    assert not torch.equal(executable(**given), found), "another call draws others"


def test_dropout_of_sdpa_stands_in_inference_too() -> None:
    """A model that drops whatever its mode is has no output to compare with; its plan says what
    became of it.
    """
    plan = effcompile.plan(Drops().eval(), inputs=inputs(), backend="torch-eager")
    assert any("drops 0.25 of its weights" in words(d.reason) for d in plan.declined if d.kind == "attention")
    assert [d.site for d in plan.decisions if d.kind == "attention"] == ["plain:attention"]


def test_a_mask_under_a_guard_is_read_dense_and_said() -> None:
    class Weak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            h = self.project(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            mask = torch.where(attention_mask[:, None, None, :] > 0, 0.0, -1e9)
            return (
                torch.nn.functional.scaled_dot_product_attention(h, h, h, mask).square().mean()
                + Attends()(x, attention_mask) * 0
            )

    plan = effcompile.plan(Weak().train(), inputs=inputs(), mode="training")
    assert any(
        "only where every query sees a key" in words(d.reason) for d in plan.declined if d.kind == "attention"
    )


def test_a_saved_plan_is_carried_out_with_its_attention(tmp_path: Path) -> None:
    model = Attends(window=8).train()
    executable = effcompile.optimize(model, inputs=inputs(), mode="training", passes=ALWAYS)
    path = executable.plan.save(tmp_path / "plan.json")
    assert {d["option"] for d in json.loads(path.read_text())["decisions"] if d["kind"] == "attention"} == {
        "fused"
    }
    again = effcompile.optimize(model, inputs=inputs(), plan=tmp_path / "plan.json")
    assert all(check.passed for check in again.plan.checks)
    torch.testing.assert_close(again(**inputs()), executable(**inputs()))


@pytest.mark.parametrize("spec", [["no-attention"], ["attention.enabled=false"]], ids=str)
def test_it_can_be_left_out(spec: list[str]) -> None:
    plan = effcompile.plan(Attends().train(), inputs=inputs(), mode="training", passes=spec)
    assert not [d for d in plan.decisions if d.kind == "attention"]


def test_an_edit_that_cannot_be_traced_is_not_said_to_be_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture then falls back on Dynamo, which traces the model as it is written."""
    fuse = FusedAttention.fuse

    def broken(self: FusedAttention, front: fx.GraphModule, given: Any) -> Any:
        attended = fuse(self, front, given)
        first = next(node for node in front.graph.nodes if node.op == "call_function")
        with front.graph.inserting_before(first):
            front.graph.call_function(torch.ops.aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)))
        front.recompile()
        assert attended.fused
        return attended

    monkeypatch.setattr(FusedAttention, "fuse", broken)
    plan = effcompile.plan(
        Attends().train(), inputs=inputs(), mode="training", passes=["attention.always=true"]
    )
    assert not [d for d in plan.decisions if d.kind == "attention"]
    assert any("cannot be traced with its attentions" in words(d.reason) for d in plan.declined)
