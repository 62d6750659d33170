"""Texts that errors of a generation are measured on: the user's, or the model's own; an encoder's beside."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from captured_once import steps_once
from generation_models import captured

import effcompile
from effcompile.backends.torch.lowered import lower_eager
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.core.errors import InputsError
from effcompile.search.generation.text import CalibrationText, as_inputs, calibration_texts, sensed


@cache
def step_of(kind: str) -> tuple[Any, GenerationStep]:
    if kind != "whisper":
        return captured(kind)
    torch.manual_seed(0)
    model = whisper()
    return model, capture_step(model)


def whisper() -> transformers.WhisperForConditionalGeneration:
    sizes = {"d_model": 32, "vocab_size": 80, "max_source_positions": 20, "pad_token_id": 0}
    parts = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = transformers.WhisperConfig(**sizes, **parts, decoder_start_token_id=3)
    return transformers.WhisperForConditionalGeneration(config).eval()


def source_of(model: Any, step: GenerationStep, rows: int) -> dict[str, torch.Tensor]:
    """What an encoder is given: other sizes than the example's, and padded, where that is free."""
    assert step.encoder is not None
    name = model.main_input_name
    like = step.encoder.kwargs[name]
    generator = torch.Generator().manual_seed(5)
    if like.is_floating_point():
        return {name: torch.randn(rows, *like.shape[1:], generator=generator)}
    mask = torch.ones(rows, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    return {name: torch.randint(3, 60, (rows, 9), generator=generator), "attention_mask": mask}


def test_options_are_measured_on_beginnings_of_texts_that_the_model_writes() -> None:
    model, step = step_of("llama")
    texts, said = calibration_texts(model, step, None, 64)
    (few,) = sensed(texts)
    whole = texts[0].tokens
    assert whole.shape == (4, 48) and torch.equal(few.tokens, whole[:, :24]) and "4 rows of 24" in said
    given = [((torch.arange(2, 42).view(1, 40),), {})]
    texts, said = calibration_texts(model, step, given, 64)
    assert sensed(texts) == texts and texts[0].tokens.shape == (1, 40) and "the user's: 40" in said


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("behind", ["decoder_input_ids", "labels", "nothing"])
def test_a_step_says_to_the_users_texts_what_the_model_says(kind: str, behind: str) -> None:
    """The captured step at a text's inputs, against the model's own forward from the encoder's input on."""
    model, step = step_of(kind)
    source = source_of(model, step, 3)
    ids = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(6))
    given = source if behind == "nothing" else {**source, behind: ids}
    (text,), said = calibration_texts(model, step, [((), given)], 32)
    assert str(text.tokens.numel()) in said and sensed([text]) == [text]
    assert said.startswith("the user's") == (behind != "nothing") != ("itself writes" in said)
    if behind == "decoder_input_ids":
        assert torch.equal(text.tokens, ids)
    elif behind == "labels":
        assert torch.equal(text.tokens[:, 1:], ids[:, :-1])
    else:
        assert text.tokens.shape == (3, 32)
    with torch.no_grad():
        wanted = model(**source, decoder_input_ids=text.tokens).logits
        args, kwargs = as_inputs(text, step.layout, step.program.kwargs)
        kwargs = {**kwargs, "rows": torch.arange(text.tokens.shape[1])} if step.boundary.rows else kwargs
        found, *_ = lower_eager(step.program)(*step.program.flat_inputs(args, kwargs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_errors_of_a_planned_translation_are_of_the_users_texts() -> None:
    """The plan names whose they are: the example's, or those that are given beside it."""
    torch.manual_seed(0)
    model, ids = captured("t5")[0], torch.randint(3, 60, (2, 12))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :10]}
    other = {"input_ids": ids.flip(1), "decoder_input_ids": ids.flip(0)[:, :7]}
    settings: dict[str, Any] = {"mode": "generation", "context": 24, "prompt": 8, "new": 4, "max_error": 0.2}
    settings["minimize"] = "memory"  # so that it rounds, whatever is fast here
    settings["backend"] = "torch-eager"
    with steps_once():
        first = effcompile.plan(model, given, **settings)
        second = effcompile.plan(model, given, calibration=[other], **settings)
    assert first.calibration_inputs == "the user's: 20 tokens"
    assert second.calibration_inputs == "the user's: 14 tokens"
    assert (
        first.predicted.error and second.predicted.error and first.predicted.error != second.predicted.error
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"labels": torch.zeros(2, 4, dtype=torch.int64)},
            r"calibration\[0\] has no input_ids for the encoder",
        ),
        ({"input_ids": torch.zeros(2, 4)}, "as a tensor of 2 dimensions"),
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(3, 4, dtype=torch.int64)},
            "2 rows of input_ids and 3 of the text behind it",
        ),
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 1, dtype=torch.int64)},
            "no labels of .rows, tokens., at least two",
        ),
    ],
)
def test_texts_that_a_translation_cannot_be_measured_on(given: dict[str, torch.Tensor], words: str) -> None:
    model, step = step_of("t5")
    with pytest.raises(InputsError, match=words):
        calibration_texts(model, step, [((), given)], 24)


def test_texts_are_whole_by_default() -> None:
    assert CalibrationText(tokens=torch.zeros(1, 99)).whole
