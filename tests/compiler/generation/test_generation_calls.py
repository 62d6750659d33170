"""What a call of a step costs beside its graph: foreseen in seconds, and less of it."""

import pytest
import torch
from generation_models import captured, ids, tiny
from torch import fx, nn

import effcompile
from effcompile.backends.torch.direct import direct
from effcompile.compiler.generation import build
from effcompile.core.goal import Goal
from effcompile.search.generation.calls import call_seconds


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "t5", "mamba", "jamba"])
def test_a_call_without_a_graph_is_timed(kind: str) -> None:
    """Whatever its cache holds: rows, windows, states, an encoder's."""
    model, step = captured(kind)
    goal = Goal.of(mode="generation", context=64, prompt=8, new=8)
    assert 0 < call_seconds(step, model, goal) < 1


def test_it_is_in_the_predicted_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = {"mode": "generation", "context": 64, "prompt": 8, "new": 8, "backend": "torch-eager"}
    monkeypatch.setattr(build, "call_seconds", lambda *_: 0.0)
    without = effcompile.plan(tiny("llama"), {"input_ids": ids(1, 9)}, **goal).predicted  # type: ignore[arg-type]
    monkeypatch.setattr(build, "call_seconds", lambda *_: 10.0)
    within = effcompile.plan(tiny("llama"), {"input_ids": ids(1, 9)}, **goal).predicted  # type: ignore[arg-type]
    assert within is not None
    assert without is not None
    assert within.seconds == pytest.approx(10.0 * (1 + 8) + (without.seconds or 0.0), abs=1.0)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.deep[0][0]
        return torch.ops.aten.add.Tensor(
            torch.ops.aten.linear.default(x, held.weight, held.bias), self.shift, alpha=2
        )


def test_direct_calls_compute_the_same_and_look_for_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fx.symbolic_trace(_Nested())
    x = torch.randn(3, 8)
    wanted, before = made(x), dict(made.named_parameters())
    changed = direct(made)
    asked: list[str] = []
    look = nn.Module.__getattr__
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: asked.append(name) or look(self, name))
    found = changed(x)
    monkeypatch.undo()
    assert torch.equal(found, wanted)
    assert not [name for name in asked if name in ("deep", "weight", "bias", "shift")]
    assert dict(changed.named_parameters()).keys() == before.keys()  # each by its one name
    targets = {node.target for node in changed.graph.nodes if node.op == "call_function"}
    assert torch.ops.aten.linear.default not in targets
    assert torch.ops.aten.add.Tensor in targets  # with a keyword it stays
