"""Frozen parameters (peft): gradients that nobody asks for are not computed, nothing is kept for them, and
the others are eager's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import VOCABULARY, Batch, cut_step, differing, eager, everything, gpt2, run_schedule

from effcompile.capture import capture_training
from effcompile.core.errors import CaptureError
from effcompile.estimate.roofline import flops
from effcompile.schedules.blocks import Blocks, split

peft = pytest.importorskip("peft")

CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def llama() -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (2, 16))
    return hf.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def work(cut: Blocks) -> tuple[float, int]:
    """(matrix FLOPs of the step, bytes that its backward reads of its forward)."""
    step = cut.step
    forward, backward = split(step)
    made = {s for node in forward for s in cut.held.made[node]}
    saved = {s for node in backward for arg in node.all_input_nodes for s in cut.held.of[arg]} & made
    return sum(flops(n) for n in step.graph.nodes if n.op == "call_function"), sum(
        cut.held.nbytes[s] for s in saved
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_trained_gradients_are_made_and_they_are_eagers(name: str) -> None:
    model, batch = llama()
    whole = work(cut_step(capture_training(model, (), batch), measure=False))
    tuned = peft.get_peft_model(model, CONFIGS[name]()).train()
    cut = cut_step(capture_training(tuned, (), batch), measure=False)
    trained = {key for key, p in tuned.named_parameters() if p.requires_grad}
    assert set(cut.step.gradients) == trained
    products, saved = work(cut)
    assert products < whole[0] and saved < whole[1]
    found, _ = run_schedule(tuned, cut, batch, everything(cut))
    assert differing(found, eager(tuned, batch)) == []


def test_a_frozen_linear_costs_four_instead_of_six_flops_per_weight_and_keeps_no_input() -> None:
    layers = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False)
    )
    x, tokens = torch.randn(6, 8), 6

    def measured() -> tuple[float, int]:
        return work(
            cut_step(capture_training(layers, (x,), loss=lambda outputs, _: outputs.sum()), measure=False)
        )

    everywhere = measured()
    layers[1].weight.requires_grad_(False)
    frozen = measured()
    assert everywhere[0] - frozen[0] == 2 * tokens * 16 * 16
    # the first linear's output: only the second's weight gradient read it
    assert everywhere[1] - frozen[1] == 4 * tokens * 16


def test_a_model_with_everything_frozen_says_so() -> None:
    model, batch = gpt2()
    model.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"requires_grad_\(True\)"):
        capture_training(model, (), batch)
