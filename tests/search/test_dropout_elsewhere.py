"""A step with dropout in its attention, planned for a GPU that is not here: its kernel keeps no scores,
whatever the CPU's does.
"""

import pytest
import torch
import transformers
from torch import Tensor, nn

from effcompile import plan
from effcompile.capture.training import capture_training
from effcompile.report.reasons import words
from effcompile.sites.attention.dropped import as_on_gpu

LENGTH = 256


class Attention(nn.Module):
    """`mask`: "", "bool" or "float"; `groups`: heads of keys are so many times fewer."""

    def __init__(
        self, mask: str = "", *, groups: int = 1, causal: bool = False, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 8)
        self.mask, self.groups, self.causal, self.dropout = mask, groups, causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        k, v = k[:, :: self.groups], v[:, :: self.groups]
        seen = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            if self.mask
            else None
        )
        mask = seen if self.mask != "float" else seen.to(x.dtype)
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=self.dropout, is_causal=self.causal, enable_gqa=self.groups > 1
        )
        return self.out(found.transpose(1, 2).reshape(x.shape)).square().mean()


def targets(model: nn.Module) -> tuple[int, list[str]]:
    changed: list[int] = []
    with torch.device("meta"):
        x = torch.empty(2, 16, 32)
    step = capture_training(
        model.to("meta"), (x,), edit=lambda front, inputs: changed.append(as_on_gpu(front))
    )
    return changed[-1], [str(node.target) for node in step.graph.nodes]


@pytest.mark.parametrize(("mask", "causal"), [("", False), ("", True), ("bool", False), ("float", False)])
def test_an_attention_with_dropout_is_one_operator_forward_and_backward(mask: str, causal: bool) -> None:
    changed, found = targets(Attention(mask, causal=causal))
    assert changed == 1 and not any("softmax" in name or "bmm" in name for name in found)
    assert sum("flash_attention_for_cpu.default" in name for name in found) == 1
    assert sum("flash_attention_for_cpu_backward" in name for name in found) == 1


def test_others_stay() -> None:
    assert targets(Attention(groups=2))[0] == 0
    assert targets(Attention(dropout=0.0))[0] == 0


def test_a_plan_for_a_gpu_keeps_no_scores_and_says_so() -> None:
    config = transformers.GPT2Config(
        n_layer=1, n_head=4, n_embd=64, vocab_size=64, n_positions=LENGTH, attn_pdrop=0.1, resid_pdrop=0.0
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.empty(8, LENGTH, dtype=torch.long)
    made = {
        target: plan(model, {"input_ids": ids, "labels": ids}, mode="training", target=target)
        for target in ("h100-sxm", "cpu-generic")
    }
    scores = 8 * 4 * LENGTH**2 * 4
    gpu, cpu = (made[target].predicted.peak_bytes or 0 for target in made)
    assert gpu < cpu - 2 * scores  # probabilities before and after the dropout
    said = [words(note) for note in made["h100-sxm"].notes]
    assert any("attention with dropout" in note for note in said)
    assert not any("attention with dropout" in words(note) for note in made["cpu-generic"].notes)
