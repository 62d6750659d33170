"""What peft and HuggingFace's Trainer change about a model after its step was planned: as the plain model, or
refused in words.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from train_helpers import Batch, gpt2, twin

import effcompile
from effcompile.core.errors import GuardError

pytestmark = pytest.mark.usefixtures("quick_training")
LORA = LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True, init_lora_weights=False)


def planned(model: nn.Module, batch: Batch, on_change: str = "error") -> Any:
    return effcompile.optimize(
        model, inputs=batch, mode="training", passes=["no-pointwise"], on_change=on_change
    )


@pytest.mark.filterwarnings("ignore:effcompile:UserWarning")
def test_a_disabled_adapter_is_refused_or_runs_as_the_plain_model() -> None:
    base, batch = gpt2(layers=1, dropout=0.0)
    model = get_peft_model(base, LORA).train()
    plain = twin(model)
    strict = planned(model, batch)
    with plain.disable_adapter(), strict.disable_adapter():
        wanted = float(plain(**batch).loss)
        with pytest.raises(GuardError, match=r"_disable_adapters was False and is True now"):
            strict(**batch)
    assert float(strict(**batch).loss) == pytest.approx(float(plain(**batch).loss)) != pytest.approx(wanted)
    eager = planned(model, batch, "eager")
    with eager.disable_adapter():
        assert float(eager(**batch).loss) == pytest.approx(wanted)


def test_noise_on_embeddings_that_trainer_adds_is_refused(tmp_path: Path) -> None:
    model, batch = gpt2(layers=1, dropout=0.0)
    examples = [{name: value[i] for name, value in batch.items()} for i in range(2)]
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, neftune_noise_alpha=5.0,
        report_to=[], use_cpu=True, save_strategy="no",
    )  # fmt: skip
    with pytest.raises(GuardError, match=r"neftune_post_forward_hook"):
        hf.Trainer(model=planned(model, batch), args=arguments, train_dataset=examples).train()


def test_adapters_added_to_a_planned_model_are_refused_at_the_call() -> None:
    model, batch = gpt2(layers=1, dropout=0.0)
    adapted = get_peft_model(planned(model, batch), LORA).train()
    with pytest.raises(GuardError, match=r"c_attn was Conv1D and is Linear now"):
        adapted(**batch)


def test_another_dtype_is_refused_or_planned_again() -> None:
    model, batch = gpt2(layers=1, dropout=0.0)
    executable = planned(model, batch).to(torch.bfloat16)
    with pytest.raises(GuardError, match=r"is torch.bfloat16 .* was planned for torch.float32"):
        executable(**batch)
