"""The smallest budget of a training step is never above what eager PyTorch needs, and where activations
dominate clearly below.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from effcompile import InfeasibleError, optimize, plan
from effcompile.passes.training.checkpoint import Checkpoint, keeping_all
from effcompile.planner.remat import BlockFront
from effcompile.schedules.blocks import WHOLE

VOCABULARY = 128
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
LLAMA = {
    **TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPT-J": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "MPT": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 128},
    ),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", {**LLAMA, **EXPERTS}),
}


#: Of the others' kinds where EFFCOMPILE_EVERY is set; Mixtral is trained below.
KINDS = MODELS if os.environ.get("EFFCOMPILE_EVERY") else ("GPT-2", "Llama", "Qwen2-MoE")


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    cls = getattr(transformers, MODELS[name][0])
    ids = torch.randint(4, VOCABULARY, (8, 64))
    return cls(cls.config_class(**MODELS[name][1])).train(), {"input_ids": ids, "labels": ids}


def eager_peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """The model, its inputs, and the highest running sum of what the profiler saw the allocator give out in a
    second step.
    """
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    resident = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return resident + peak


@pytest.mark.parametrize("name", KINDS)
def test_the_smallest_budget_is_below_what_eager_needs(name: str, quick_training: Path) -> None:
    model, batch = built(name)
    peak = eager_peak(model, batch)
    with pytest.raises(InfeasibleError) as refused:
        plan(
            model,
            batch,
            mode="training",
            memory=2**10,
            passes=["no-microbatch", "no-pointwise", "no-loss_head"],
            target="cpu-generic",
        )
    assert refused.value.nearest["memory"] <= 0.8 * peak


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_mixture_of_experts_trains_within_less_than_eager_needs(
    implementation: str, quick_training: Path
) -> None:
    """Loss and all gradients are compared with the model's own when it is planned; a second batch, of other
    experts, is compared here.
    """
    model, batch = built("Mixtral")
    model.set_experts_implementation(implementation)
    budget = int(0.8 * eager_peak(model, batch))
    planned = optimize(model, inputs=batch, mode="training", memory=budget, passes=["no-pointwise"])
    assert planned.plan.measured is not None and (planned.plan.measured.peak_bytes or 0) <= budget
    other = {name: tensor.flip(0).add(7) % VOCABULARY for name, tensor in batch.items()}
    planned(**other).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model(**other).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


class Drawing(nn.Module):
    """Few values that are drawn: the generator's state is larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.head = nn.Linear(16, 16), nn.AlphaDropout(0.2), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> transformers.modeling_outputs.CausalLMOutput:
        noisy = self.drop(self.linear(x)) * torch.bernoulli(torch.full((len(x), 1), 0.9))
        return transformers.modeling_outputs.CausalLMOutput(loss=self.head(noisy).pow(2).mean())


def test_draws_are_kept_where_the_generators_state_is_larger(quick_training: Path) -> None:
    """Remade, they would hold 5,056 bytes each from the forward on, and as many once more."""
    torch.manual_seed(0)
    model, batch = Drawing().train(), {"x": torch.randn(8, 16)}
    peak = eager_peak(model, batch)
    with pytest.raises(InfeasibleError) as refused:
        plan(model, batch, mode="training", memory=1)
    assert refused.value.nearest["memory"] <= peak
    unlimited = plan(model, batch, mode="training")
    assert unlimited.predicted.peak_bytes is not None and unlimited.predicted.peak_bytes <= peak


class Scan(nn.Module):
    """What mamba's scan is in PyTorch: a loop over the tokens that reads two large values part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> transformers.modeling_outputs.CausalLMOutput:
        a, b = self.a(x).sigmoid(), self.b(x).tanh()
        state, seen = torch.zeros_like(a[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + b[:, t]
            seen.append(self.c(state))
        return transformers.modeling_outputs.CausalLMOutput(loss=torch.stack(seen, 1).square().mean())


def test_a_loop_over_tokens_needs_no_more_than_eager(quick_training: Path) -> None:
    """Each part's gradient, padded to the whole, was added in a new tensor: the smallest budget was above
    eager's peak.
    """
    torch.manual_seed(0)
    model, batch = Scan().train(), {"x": torch.randn(8, 24, 8)}
    peak = eager_peak(model, batch)
    least = {}
    for beside in ("no-parts", "parts"):
        passes = ["no-microbatch", "no-pointwise", *(["no-parts"] if beside == "no-parts" else [])]
        with pytest.raises(InfeasibleError) as refused:
            plan(model, batch, mode="training", memory=1, passes=passes, target="cpu-generic")
        least[beside] = int(refused.value.nearest["memory"])
    planned = optimize(model, inputs=batch, mode="training", memory=peak, passes=["no-pointwise"]).plan
    decided = [d for d in planned.decisions if d.by == "parts"]
    assert decided and planned.measured is not None and (planned.measured.peak_bytes or 0) <= peak
    again = optimize(Scan().train(), inputs=batch, plan=planned).plan
    assert [d for d in again.decisions if d.by == "parts"] == decided and again.measured is not None
    print(peak, least)
    assert least["parts"] <= 0.9 * least["no-parts"] < least["no-parts"] <= peak


class Powers(nn.Module):
    """The derivative of each square is a value that autograd makes in the backward, and the joint graph
    beside the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> transformers.modeling_outputs.CausalLMOutput:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return transformers.modeling_outputs.CausalLMOutput(loss=x.mean())


def test_autograds_own_schedule_is_always_there(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where blocks offer nothing but to keep everything, a step needs no more than eager's; and its plan can
    be applied again.
    """
    alone = lambda self, block: BlockFront(  # noqa: E731
        options=(keeping_all(block),), found=1, complete=True, proven=True, solver="none", seconds=0.0
    )
    monkeypatch.setattr(Checkpoint, "front", alone)
    torch.manual_seed(0)
    model, batch = Powers().train(), {"x": torch.randn(64, 16)}
    peak = eager_peak(model, batch)
    asked = {"mode": "training", "passes": ["checkpoint"]}
    kept = plan(model, batch, **asked).predicted.peak_bytes
    with pytest.raises(InfeasibleError) as refused:
        plan(model, batch, memory=1, **asked)
    least = int(refused.value.nearest["memory"])
    assert least <= peak + 64 and least < (kept or 0)
    made = optimize(model, inputs=batch, memory=least, **asked)
    assert {d.site for d in made.plan.decisions if d.by == "checkpoint"} == {WHOLE}
    assert made.plan.measured is not None and (made.plan.measured.peak_bytes or 0) <= least
    made.plan.save(tmp_path / "plan.json")
    again = optimize(Powers().train(), inputs=batch, plan=tmp_path / "plan.json").plan
    assert again.measured is not None and again.measured.peak_bytes == made.plan.measured.peak_bytes
