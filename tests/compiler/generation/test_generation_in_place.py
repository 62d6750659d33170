"""ONNX Runtime's attentions over a cache that stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from generation_models import bare, captured, ids
from torch import nn

import effcompile
from effcompile.backends.onnxruntime.measure_in_place import Sizes, seconds
from effcompile.capture.generation import GenerationStep
from effcompile.core.cost import Cost
from effcompile.core.errors import LoweringError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Decision
from effcompile.passes import Choice, Declined
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.search.generation import in_place
from effcompile.sites.attention.cached import IN_PLACE, JOINED, KIND, SITE, cached_attentions

CONTEXT = 120
_TAKEN = Decision(
    site=SITE, kind=KIND, option=IN_PLACE.name, baseline=JOINED.name, by=KIND, cost=Cost(), form=IN_PLACE,
    baseline_cost=Cost(),
)  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> GenerationExecutable:
    """Prompts of more than 64 tokens are read in chunks."""
    return bare(captured("llama"), "onnxruntime", CONTEXT, decisions=(_TAKEN,))[1]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return captured("llama")[0]


def _says(model: Callable[..., torch.Tensor], prompt: torch.Tensor, **how: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, **how)  # type: ignore[attr-defined]


@pytest.mark.parametrize("took", [(2e-3, 1e-3), (1e-3, 2e-3)])
def test_it_is_offered_by_what_both_ways_take(
    took: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle counts by hand: 2 layers, a prompt of 100 tokens in 2 chunks, 20 tokens."""
    monkeypatch.setattr(in_place, "seconds", lambda sizes: took)
    goal = Goal.of(mode="generation", context=CONTEXT, prompt=100, new=20, batch=3)
    step, here = captured("llama")[1], SimpleNamespace(here=True)
    (choice,) = in_place.in_place_choices(step, goal, here, [SimpleNamespace(name="onnxruntime")], 64)
    joined, own = choice.options
    assert choice.baseline == joined.name == JOINED.name and own.form == IN_PLACE
    # a chunk behind a past is one row's, a token all rows'
    assert joined.cost.seconds == pytest.approx(2 * (2 * 3 + 20) * took[0])
    assert own.cost.seconds == pytest.approx(2 * (2 * 3 + 20) * took[1])
    assert (joined.cost.bytes_kept, own.cost.bytes_kept) == (4 * 3 * CONTEXT * 2 * 8 * 4, 0)
    assert not in_place.in_place_choices(step, goal, here, [SimpleNamespace(name="torch-eager")], 64)
    elsewhere = SimpleNamespace(here=False)
    assert not in_place.in_place_choices(step, goal, elsewhere, [SimpleNamespace(name="onnxruntime")], 64)


def test_it_is_found_in_what_was_built(planned: GenerationExecutable) -> None:
    assert planned.parts["step"].applied[SITE] == IN_PLACE


@pytest.mark.parametrize(("rows", "tokens"), [(3, 20), (2, 100)])
def test_padded_batches_and_chunks_are_the_models(
    rows: int, tokens: int, llama: nn.Module, planned: GenerationExecutable
) -> None:
    """100 tokens are two chunks: behind the first one, rows of a batch are read one by one."""
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


@pytest.mark.parametrize(
    ("kind", "layers", "why"),
    [
        ("gpt2", 2, {}),
        ("gemma3_text", 1, {"model.model.layers.0.self_attn": "a window of the last tokens"}),
        (
            "t5",
            0,
            {f"model.decoder.block.{n}.layer.0.SelfAttention": "numbers are added" for n in range(2)},
        ),
    ],
)
def test_which_attentions_may_and_why_others_may_not(
    kind: str, layers: int, why: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's windows do not keep all tokens; T5's mask is its biases. Rows of an encoder never grow, and
    nothing is said of them.
    """
    monkeypatch.setattr(in_place, "seconds", lambda sizes: (2e-3, 1e-3))
    step = captured(kind)[1]
    assert len(cached_attentions(step.program)) == layers
    offered, refused = _offered(step)
    assert [choice.site for choice in offered] == [SITE] * bool(layers)
    assert {d.site.split(":")[0] for d in refused} == why.keys()
    for declined in refused:
        assert why[declined.site.split(":")[0]] in str(declined.reason), declined
        assert (declined.kind, declined.option) == (KIND, IN_PLACE.name)


def test_images_and_an_older_runtime_are_no_case_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = captured("llama")[1]
    named = [replace(i, name="images") if i.name == "positions" else i for i in step.program.inputs]
    of_images = replace(step, program=replace(step.program, inputs=tuple(named)))

    def older(sizes: Sizes) -> tuple[float, float]:
        raise LoweringError("no such operator")

    monkeypatch.setattr(in_place, "seconds", older)
    for given, said in ((of_images, "takes images"), (step, "version of ONNX Runtime")):
        offered, (declined,) = _offered(given)
        assert not offered and declined.site == SITE and said in str(declined.reason)


def _offered(step: GenerationStep) -> tuple[list[Choice], list[Declined]]:
    goal, here = Goal.of(mode="generation", context=CONTEXT, prompt=100, new=20), SimpleNamespace(here=True)
    made = in_place.in_place_choices(step, goal, here, [SimpleNamespace(name="onnxruntime")], 64)
    choices = [each for each in made if isinstance(each, Choice)]
    return choices, [each for each in made if isinstance(each, Declined)]


def test_both_ways_are_timed() -> None:
    assert all(took > 0 for took in seconds(Sizes(batch=1, heads=4, groups=2, width=8, past=16, new=1)))
    assert all(took > 0 for took in seconds(Sizes(batch=1, heads=4, groups=2, width=8, past=16, new=4)))
