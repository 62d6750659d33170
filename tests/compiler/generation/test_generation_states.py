"""Layers that keep a state of one size: state-space models, linear attention, and hybrids with attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from captured_once import steps_once
from generation_models import CONTEXT, Planned, bare, captured, ids, more, same, tiny

import effcompile
from effcompile.backends import load_backend
from effcompile.capture.generation import capture_step
from effcompile.core.goal import Goal
from effcompile.ir.cache import Growth
from effcompile.proof.generation.speculation import speculated

#: State alone, state beside attention, both in one layer, a convolution alone.
KINDS = ("mamba", "qwen3_next", "falcon_h1", "lfm2", *more("jamba"))
#: Other models of the same layers.
OTHERS = (
    "mamba2", "zamba2",
    *more("nemotron_h", "falcon_mamba", "bamba", "granitemoehybrid", "olmo_hybrid", "qwen3_5_text", "zamba"),
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def planned(request: pytest.FixtureRequest) -> Planned:
    return bare(captured(request.param))


def named(planned: Planned, cache: Any) -> dict[str, Any]:
    """A cache under the name that the model's forward has for it."""
    return {planned[1].stepper.step.boundary.cache: cache}


def test_256_greedy_tokens_are_the_models(planned: Planned) -> None:
    same(planned, ids(1, 9), max_new_tokens=256, do_sample=False)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["sampling", "beams", "several"],
)
def test_other_ways_to_generate(planned: Planned, how: dict[str, Any]) -> None:
    same(planned, ids(2, 9), max_new_tokens=24, **how)


def test_a_prompt_in_chunks(planned: Planned) -> None:
    """Of 64 tokens each: Hugging Face reads it at once, and Mamba's own forward would forget the first."""
    same(planned, ids(2, 150), max_new_tokens=8, do_sample=False)


def test_a_left_padded_row_is_the_row_alone(planned: Planned) -> None:
    """And the model's, whose masks hide padding from states; through chunks, too."""
    for length, padding in ((9, 4), (100, 70)):
        mask, text = torch.ones(2, length, dtype=torch.int64), ids(2, length)
        mask[0, :padding], text[0, :padding] = 0, 0
        found = same(planned, text, attention_mask=mask, max_new_tokens=16, do_sample=False)
        alone = planned[1].generate(text[:1, padding:], max_new_tokens=16, do_sample=False)
        assert torch.equal(found[:1, padding:], alone)


@pytest.mark.parametrize("sizes", [(20, 10), (1, 1, 20, 8), (29, 1)])
def test_a_cache_is_handed_back_and_taken_again(planned: Planned, sizes: tuple[int, ...]) -> None:
    """The oracle is the model's forward over the whole text, which has no cache."""
    model, executable = planned
    text, cache, at, parts = ids(2, 30), transformers.DynamicCache(config=model.config), 0, []
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits
    for size in sizes:
        made = executable(text[:, at : at + size], **named(planned, cache))
        assert made[executable.stepper.step.boundary.cache] is cache
        parts.append(made.logits)
        at += size
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-5)


def test_a_cache_goes_from_the_model_to_the_plan_and_back(planned: Planned) -> None:
    model, executable = planned
    text, cache = ids(1, 12), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits[:, 9:]
        model(text[:, :9], **named(planned, cache), use_cache=True)
        found = [
            run(text[:, at : at + 1], **named(planned, cache), use_cache=True).logits
            for at, run in ((9, executable), (10, model), (11, executable))
        ]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-5)


def test_the_cache_takes_its_bytes_at_once_and_states_stay(planned: Planned) -> None:
    """The oracle counts the storages that the cache holds."""
    model, executable = planned
    cache, layout = transformers.DynamicCache(config=model.config), executable.lowered.layout
    for count in (30, 1, 1, 140):
        executable(ids(1, count), **named(planned, cache))
        tensors = [
            tensor
            for layer in cache.layers
            for tensor in (
                *(getattr(layer, name, None) for name in ("keys", "values")),
                *getattr(layer, "conv_states", {}).values(),
                *getattr(layer, "recurrent_states", {}).values(),
            )
            if tensor is not None
        ]
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == layout.nbytes(CONTEXT, 1)
    rows = sum(leaf.nbytes(1, 1) for leaf in layout if leaf.growth is Growth.FULL)
    for context in (1, 64, 4096):
        assert layout.nbytes(context, 1) == layout.state_bytes(1) + context * rows


def test_saved_and_opened_again(planned: Planned, tmp_path: Path) -> None:
    _, executable = planned
    executable.save(tmp_path / "out")
    opened = effcompile.load(tmp_path / "out")
    for how in ({}, {"num_beams": 2}):
        wanted = executable.generate(ids(2, 9), max_new_tokens=10, do_sample=False, **how)
        assert torch.equal(opened.generate(ids(2, 9), max_new_tokens=10, do_sample=False, **how), wanted)


def test_nothing_is_drafted(planned: Planned) -> None:
    """A state that has seen a rejected draft has no way back."""
    _, executable = planned
    found = speculated(
        executable, [ids(1, 40)], Goal.of(mode="generation", context=CONTEXT), (2,), keep=False
    )
    assert found.decision is None
    assert "cannot be taken back" in str(found.declined[0].reason)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3}
    with pytest.raises((ValueError, effcompile.GuardError), match=r"stateful|records its past"):
        executable.generate(ids(1, 4).repeat(1, 4), **how)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_of_these_layers(kind: str) -> None:
    model = tiny(kind)
    planned = bare((model, capture_step(model)))
    same(planned, ids(2, 70), max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize(("kind", "said"), [("mamba", "recurrence"), ("mixtral", "by expert")])
def test_onnxruntime_says_which_operator_it_has_not(kind: str, said: str) -> None:
    program = captured(kind)[1].program
    refused = load_backend("onnxruntime").refuses(program, Goal.of(mode="generation", context=64))
    assert refused is not None and said in str(refused)


@pytest.mark.parametrize(("kind", "context"), [("mamba", 48), *more(("qwen3_next", 96))])
def test_a_plan_within_a_budget(kind: str, context: int) -> None:
    """Fewer bits where memory says so; what is said of the cache is what it holds."""
    model, how = (
        tiny(kind, hidden_size=64),
        {"mode": "generation", "context": context, "prompt": 24, "new": 8},
    )
    text = {"input_ids": ids(2, 32)}
    whole = effcompile.plan(model, text, backend="torch-eager", passes=["quantize"], **how)
    memory = int(0.9 * whole.predicted.peak_bytes)
    made = effcompile.optimize(
        model,
        memory=memory,
        max_error=0.2,
        backend="torch-eager",
        passes=["quantize"],
        calibration=[text],
        **how,
    )
    assert 0 < made.plan.measured.peak_bytes <= memory
    assert {decision.option for decision in made.plan.decisions} - {"fp32"}
    held = made.lowered.layout.state_bytes(1)
    assert f"of the cache {held} bytes are states" in " ".join(map(str, made.plan.notes))
    assert made.generate(ids(1, 9), max_new_tokens=12, do_sample=False).shape == (1, 21)


@pytest.mark.parametrize("changed", ["rows", "sizes"])
def test_a_cache_of_other_sizes_is_refused_in_words(planned: Planned, changed: str) -> None:
    """In any layer, whatever the others hold: kernels read and write as many bytes as the sizes say."""
    model, executable = planned
    for at in range(len(model.config.layer_types)):
        cache = transformers.DynamicCache(config=model.config)
        executable(ids(2, 5), **named(planned, cache))
        for kind in ("conv_states", "recurrent_states", "keys"):
            held = getattr(cache.layers[at], kind, None)
            table = held if isinstance(held, dict) else {0: held}
            if (before := table.get(0)) is None:
                continue
            table[0] = before.repeat(2, *(1,) * (before.dim() - 1)) if changed == "rows" else before[:, 1:]
            if table is not held:
                setattr(cache.layers[at], kind, table[0])
            with pytest.raises(effcompile.GuardError, match=r"4 rows in layer|the planned model does not"):
                executable(ids(2, 1), **named(planned, cache))
            table[0] = before
            if table is not held:
                setattr(cache.layers[at], kind, before)
        executable(ids(2, 1), **named(planned, cache))


def test_a_refused_cache_is_called_what_the_model_calls_it(planned: Planned) -> None:
    model, executable = planned
    name = executable.stepper.step.boundary.cache
    other = transformers.DynamicCache(config=tiny("llama").config)
    with pytest.raises(effcompile.GuardError, match=f"^{name} is a DynamicCache whose layer 0"):
        executable(ids(1, 5), **{name: other})
    twice = transformers.DynamicCache(config=model.config)
    executable(ids(1, 5), **named(planned, twice))
    with pytest.raises(effcompile.GuardError, match=f"^{name} has 1 rows"):
        executable(ids(2, 1), **named(planned, twice))


@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text", *more("jamba")])
def test_a_prompt_up_to_the_end_of_the_context_is_measured(kind: str) -> None:
    """Its last tokens are taken again and again, of a cache that Hugging Face cannot cut."""
    how: dict[str, Any] = {"mode": "generation", "context": 24, "prompt": 23, "new": 1}
    with steps_once():
        made = effcompile.optimize(captured(kind)[0], {"input_ids": ids(2, 24)}, backend="torch-eager", **how)
    assert made.plan.measured is not None and made.plan.measured.seconds
    assert made.generate(ids(1, 23), max_new_tokens=1, do_sample=False).shape == (1, 24)
