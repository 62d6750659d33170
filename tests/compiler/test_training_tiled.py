"""A step whose attentions' gradients are by tiles: within its budget, as the allocator counts, and proven."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import effcompile
from effcompile.ops.bf16_attention_backward import kernels
from effcompile.passes.training import tiled
from effcompile.passes.training.tiled import KIND, TILES

pytestmark = [
    pytest.mark.usefixtures("quick_planning"),
    pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels())),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_with_tiles_keeps_its_budget(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "time_share", lambda queries, keys, width: 0.3)
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model, ids = hf.LlamaForCausalLM(config).to(dtype).train(), torch.randint(0, 300, (2, 40))
    batch, error = {"input_ids": ids, "labels": ids}, 0.05 if dtype is torch.float32 else None
    passes = ["no-attention"]  # a fused attention, which takes none of them, is faster on some machines
    passes += ["precision.always=true"] if error else []

    def plan(**goal: int) -> effcompile.Plan:
        return effcompile.optimize(
            model, inputs=batch, mode="training", max_error=error, passes=passes, **goal
        ).plan  # type: ignore[no-any-return]

    free = plan()
    tight = plan(memory=int(0.85 * free.predicted.peak_bytes))
    for made in (free, tight):
        assert (KIND, TILES) in {(d.kind, d.option) for d in made.decisions}
        assert made.measured is not None and made.measured.peak_bytes <= made.predicted.peak_bytes
