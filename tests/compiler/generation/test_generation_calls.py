"""What a call of a step costs beside its graph: foreseen in seconds, and less of it."""

import pytest
import torch
import transformers
from captured_once import steps_once
from generation_models import bare, captured, ids
from torch import fx, nn

import effcompile
from effcompile.backends.torch.direct import direct
from effcompile.compiler.generation import build
from effcompile.core.goal import Goal
from effcompile.ops.by_expert import by_expert
from effcompile.search.generation.calls import call_seconds


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "t5", "mamba", "jamba"])
def test_a_call_without_a_graph_is_timed(kind: str) -> None:
    """Whatever its cache holds: rows, windows, states, an encoder's."""
    model, step = captured(kind)
    goal = Goal.of(mode="generation", context=64, prompt=8, new=8)
    assert 0 < call_seconds(step, model, goal) < 1


def test_it_is_in_the_predicted_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = {"mode": "generation", "context": 64, "prompt": 8, "new": 8, "backend": "torch-eager"}
    model, text = captured("llama")[0], {"input_ids": ids(1, 9)}
    monkeypatch.setattr(build, "call_seconds", lambda *_: 0.0)
    with steps_once():
        without = effcompile.plan(model, text, **goal).predicted  # type: ignore[arg-type]
        monkeypatch.setattr(build, "call_seconds", lambda *_: 10.0)
        within = effcompile.plan(model, text, **goal).predicted  # type: ignore[arg-type]
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


@pytest.mark.parametrize("tokens", [(0, 1, 1, 3), (9, 9, 9, 9), (0, 0, 0, 0)])
def test_products_by_expert_are_the_models_own(tokens: tuple[int, ...]) -> None:
    """With few tokens of an expert and with many, and where a weight does not lie as the kernels read it."""
    held, ends = torch.randn(4, 40, 24), torch.tensor(tokens)
    x = torch.randn(int(ends[-1]), 24)
    for weight in (held.transpose(1, 2), held.transpose(1, 2).contiguous()):
        starts = [0, *tokens]
        wanted = torch.cat([x[starts[e] : starts[e + 1]] @ weight[e] for e in range(4)])
        torch.testing.assert_close(by_expert(x, weight, ends), wanted)


def test_a_step_of_experts_calls_no_operator_of_transformers() -> None:
    graph = bare(captured("mixtral"))[1].lowered.run.graph  # type: ignore[attr-defined]
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert by_expert in targets
    assert not [each for each in targets if "grouped_mm" in str(each)]


def test_an_encoder_of_unknown_inputs_is_refused_in_words() -> None:
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = transformers.Speech2TextConfig(d_model=16, vocab_size=32, **sizes)
    model = transformers.Speech2TextForConditionalGeneration(config).eval()
    with pytest.raises(effcompile.UsageError, match="reads input_features of sizes"):
        effcompile.optimize(model, mode="generation", context=16)
