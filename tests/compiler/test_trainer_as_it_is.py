"""HuggingFace's Trainer with a model as people have it: its default configuration, checkpoints in mid-run,
and resuming from one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import effcompile
from effcompile.capture.config_reads import ConfigReads, recording

pytestmark = pytest.mark.usefixtures("quick_planning")
SETTINGS = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def made() -> hf.GPT2LMHeadModel:
    """With tied weights, a cache, and no dtype in its configuration, as any that was not loaded from a
    folder.
    """
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**SETTINGS, **DROPOUTS)).train()
    assert model.config.use_cache and model.config.tie_word_embeddings
    return model


def examples() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [dict.fromkeys(("input_ids", "labels"), torch.randint(0, 32, (8,))) for _ in range(8)]


def batch() -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([example[name] for example in examples()[:2]]) for name in ("input_ids", "labels")
    }


def trained(model: nn.Module, folder: Path, *, resume: bool = False, **more: Any) -> list[float]:
    """The losses of four steps, with a checkpoint after the second; or of the last two, from that
    checkpoint.
    """
    arguments = hf.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, logging_steps=1, save_steps=2,
        report_to=[], use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=examples())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    trainer.save_model(str(folder / "last"))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def strict(model: nn.Module) -> Any:
    return effcompile.optimize(model, inputs=batch(), mode="training", passes=["no-pointwise"])


def deferred(model: nn.Module) -> Any:
    return effcompile.optimize(model, mode="training", passes=["no-pointwise"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = made()
    return trained(model, tmp_path_factory.mktemp("plain")), model.state_dict()


@pytest.mark.parametrize("planned", [strict, deferred])
def test_a_planned_model_trains_saves_and_resumes(
    planned: Callable[[nn.Module], Any], plain: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    losses, weights = plain
    model = made()
    assert trained(planned(model), tmp_path) == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "last")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert trained(planned(made()), tmp_path, resume=True)[-2:] == pytest.approx(losses[-2:], rel=1e-5)


def test_trainers_mixed_precision_is_that_of_the_plain_model(tmp_path: Path) -> None:
    """Given no inputs, the step is planned at its first call, within Trainer's autocast; with inputs it was
    planned without.
    """
    wanted = trained(made(), tmp_path / "plain", bf16=True)
    assert trained(deferred(made()), tmp_path / "planned", bf16=True) == pytest.approx(wanted, rel=2e-3)
    with pytest.raises(effcompile.EffcompileError, match="Give no inputs to"):
        trained(strict(made()), tmp_path / "strict", bf16=True)


def test_a_deferred_step_is_taken_for_its_model() -> None:
    model = made()
    step = deferred(model)
    assert (
        isinstance(step, hf.PreTrainedModel)
        and step.config is model.config
        and type(step).__name__ == "Deferred"
    )
    # its call returns no cache, whatever the model's does
    assert not isinstance(effcompile.optimize(model.eval()), hf.PreTrainedModel)


def test_what_the_forward_reads_of_its_configuration_is_guarded_and_nothing_else() -> None:
    """Trainer aligns tokens with its tokenizer, and save_pretrained() writes the dtype: GPT-2's forward reads
    neither.
    """
    step = strict(made())
    wanted = step(**batch()).loss.item()
    for name, value in {
        "dtype": "float32",
        "bos_token_id": 7,
        "pad_token_id": 3,
        "architectures": ["GPT2LMHeadModel"],
    }.items():
        setattr(step.config, name, value)
        assert step(**batch()).loss.item() == wanted
    step.config.vocab_size = 16
    with pytest.raises(effcompile.EffcompileError, match=r"config.vocab_size was 32 and is 16 now"):
        step(**batch())


def test_recording_leaves_a_configuration_as_it_was() -> None:
    config, read = (model := made()).config, ConfigReads()
    kind, held = type(config), dict(vars(config))
    with recording(model, read):
        assert isinstance(config, kind) and type(config) is not kind and config.hidden_size == 16
        # one stands for the other
        assert read.may_read(config, "hidden_size", named=True) and read.may_read(
            config, "n_embd", named=False
        )
        assert not read.may_read(config, "bos_token_id", named=True)
    assert type(config) is kind and vars(config) == held
    with recording(model, read):
        vars(config)
        config.to_dict()
    assert read.may_read(config, "bos_token_id", named=True) and read.may_read(
        object(), "anything", named=True
    )
    assert not read.may_read(config, "bos_token_id", named=False) and not read.may_read(
        object(), "anything", named=False
    )


@pytest.mark.parametrize(("name", "value", "reads"), [("pad_token_id", 5, True), ("bos_token_id", 7, False)])
def test_a_classifier_reads_where_its_rows_end(name: str, value: int, reads: bool) -> None:
    torch.manual_seed(0)
    model = hf.GPT2ForSequenceClassification(
        hf.GPT2Config(**SETTINGS, **DROPOUTS, pad_token_id=0, num_labels=2)
    ).train()
    inputs = {"input_ids": batch()["input_ids"], "labels": torch.tensor([0, 1])}
    step = effcompile.optimize(model, inputs=inputs, mode="training", passes=["no-pointwise"])
    setattr(model.config, name, value)
    if reads:
        with pytest.raises(effcompile.EffcompileError, match=rf"config.{name} was"):
            step(**inputs)
    else:
        torch.testing.assert_close(step(**inputs).loss, model(**inputs).loss)
