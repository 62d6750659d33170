"""ONNX Runtime's attentions over a cache that stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from generation_models import captured, ids, tiny
from torch import nn

import effcompile
from effcompile.backends.onnxruntime.measure_in_place import Sizes, seconds
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.search.generation import in_place
from effcompile.sites.attention.cached import IN_PLACE, JOINED, SITE, cached_attentions

HOW: dict[str, Any] = {
    "mode": "generation", "backend": "onnxruntime", "context": 700, "prompt": 600, "new": 8,
}  # fmt: skip


def _planned(model: nn.Module, took: tuple[float, float]) -> GenerationExecutable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "seconds", lambda sizes: took)
        return effcompile.optimize(model, {"input_ids": ids(1, 24)}, **HOW)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def planned(llama: nn.Module) -> GenerationExecutable:
    return _planned(llama, (2e-3, 1e-3))


def _says(model: Callable[..., torch.Tensor], prompt: torch.Tensor, **how: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, **how)  # type: ignore[attr-defined]


def test_it_is_taken_where_it_is_faster_and_found_in_what_was_built(planned: GenerationExecutable) -> None:
    (decision,) = [d for d in planned.plan.decisions if d.site == SITE]
    assert decision.form == IN_PLACE and decision.applied == IN_PLACE.name
    assert all(check.passed for check in planned.plan.checks)


def test_it_is_refused_where_it_is_slower(llama: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "seconds", lambda sizes: (1e-3, 2e-3))
        plan = effcompile.plan(llama, {"input_ids": ids(1, 24)}, **HOW)
    (why,) = [d for d in plan.declined if d.site == SITE]
    assert plan.forms()[SITE] == JOINED and why.option == IN_PLACE.name
    assert "not faster" in str(why.reason)


@pytest.mark.parametrize(("rows", "tokens"), [(3, 20), (2, 600)])
def test_padded_batches_and_chunks_are_the_models(
    rows: int, tokens: int, llama: nn.Module, planned: GenerationExecutable
) -> None:
    """600 tokens are two chunks: behind the first one, rows of a batch are read one by one."""
    prompt, mask = ids(rows, tokens), torch.ones(rows, tokens, dtype=torch.int64)
    mask[0, :7], prompt[0, :7] = 0, 0
    wanted = _says(llama, prompt, attention_mask=mask)
    assert torch.equal(_says(planned, prompt, attention_mask=mask), wanted)


def test_beams_and_a_cache_that_is_handed_back(llama: nn.Module, planned: GenerationExecutable) -> None:
    prompt = ids(2, 20)
    assert torch.equal(_says(planned, prompt, num_beams=3), _says(llama, prompt, num_beams=3))
    first = planned(input_ids=prompt, use_cache=True)
    before = first.past_key_values.layers[0].keys
    second = planned(input_ids=prompt[:, :1], past_key_values=first.past_key_values, use_cache=True)
    after = second.past_key_values.layers[0].keys
    assert after.shape[2] == 21 and after.data_ptr() == before.data_ptr()  # nothing was copied


def test_saved_and_opened_here_and_by_onnx_runtime_alone(
    llama: nn.Module, planned: GenerationExecutable, tmp_path: Path
) -> None:
    planned.save(tmp_path)
    prompt = ids(2, 20)
    assert torch.equal(_says(effcompile.load(tmp_path), prompt), _says(llama, prompt))
    graph = onnx.load(tmp_path / "step.onnx").graph
    assert sum(node.op_type == "GroupQueryAttention" for node in graph.node) == 2
    alone = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((2, 2, 0, 8), np.float32)
    given = {
        "tokens": prompt.numpy(), "mask": np.ones((2, 20), np.int64), "rows": np.array([19]),
        "positions": np.arange(20)[None].repeat(2, 0), **{f"past_{at}": empty for at in range(4)},
    }  # fmt: skip
    logits, *present = alone.run(None, given)
    torch.testing.assert_close(torch.from_numpy(logits), llama(prompt).logits[:, -1:], rtol=1e-4, atol=1e-4)
    assert [each.shape for each in present] == [(2, 2, 20, 8)] * 4


@pytest.mark.parametrize(("kind", "layers"), [("gpt2", 2), ("gemma3_text", 1), ("t5", 0)])
def test_which_attentions_may(kind: str, layers: int) -> None:
    """Gemma's windows do not keep all tokens; T5's mask is its biases."""
    assert len(cached_attentions(captured(kind)[1].program)) == layers


def test_both_ways_are_timed() -> None:
    assert all(took > 0 for took in seconds(Sizes(batch=1, heads=4, groups=2, width=8, past=16, new=1)))
    assert all(took > 0 for took in seconds(Sizes(batch=1, heads=4, groups=2, width=8, past=16, new=4)))
