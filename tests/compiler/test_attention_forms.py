"""From a model with eager attention to an artifact that holds the planned form, with quantised linears beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.machine.target import KernelCall
from effcompile.report.reasons import words
from effcompile.sites.attention import closed_masks, normalise, rewrite

pytestmark = pytest.mark.usefixtures("shared_programs")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def mistral() -> tuple[MistralForCausalLM, dict[str, torch.Tensor]]:
    """Grouped heads, a window of 6, and a padded row."""
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6, max_position_embeddings=64, attn_implementation="eager")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    return MistralForCausalLM(config).eval(), {"input_ids": torch.randint(0, 64, (2, 24)), "attention_mask": mask}


def fast(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one kernel seem to cost nothing, and all others the same."""

    def measure(_: TorchEager, call: KernelCall) -> float | None:
        return 1e-9 if call.kernel == kernel else 1e-3 if call.kernel.startswith(("attention", "linear/int8")) else 1e-2

    monkeypatch.setattr(TorchEager, "measure", measure)


def attention(plan: Any) -> set[tuple[str, str, str]]:
    return {(d.option, d.applied, d.baseline) for d in plan.decisions if d.kind == "attention"}


@pytest.mark.parametrize("form", ["tiled", "math"])
def test_the_planned_form_is_what_the_artifact_holds(form: str, mistral: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, inputs = mistral
    fast(f"attention/{form}", monkeypatch)
    executable = effcompile.optimize(model, inputs=inputs, backend="torch-eager")
    assert attention(executable.plan) == {(form, form, "math")}
    assert all(check.passed for check in executable.plan.checks)
    executable.save(tmp_path)
    found = TorchEager().open(tmp_path, executable.plan)(inputs)
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[0][seen], wanted[seen], rtol=1e-4, atol=1e-4)


def test_what_it_sees_is_in_the_plan_and_it_composes_with_int8(mistral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = mistral
    fast("attention/tiled", monkeypatch)
    executable = effcompile.optimize(model, inputs=inputs, backend="torch-eager", max_error=0.2)
    found = [d for d in executable.plan.decisions if d.kind == "attention"]
    assert all(words(d.note).startswith("sees causal ∧ window 6 ∧ padding (attention_mask)") for d in found) and len(found) == 2
    assert any(d.option.startswith("int8") and d.applied == d.option for d in executable.plan.decisions if d.kind == "linear")
    again = effcompile.optimize(model, inputs=inputs, plan=executable.plan)
    assert attention(again.plan) == {("tiled", "tiled", "math")} and all(check.passed for check in again.plan.checks)


def test_the_graph_is_searched_once_and_a_mask_recovered_once(mistral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers share one mask: planning, two ways of lowering it and applying the plan again find no attention anew."""
    model, inputs = mistral
    counts = {"match": 0, "recover": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(normalise, "match", counting("match", normalise.match))
    monkeypatch.setattr(rewrite, "match", counting("match", rewrite.match))
    monkeypatch.setattr(closed_masks, "recover_mask", counting("recover", closed_masks.recover_mask))
    fast("attention/tiled", monkeypatch)
    executable = effcompile.optimize(model, inputs=inputs, backend="torch-eager")
    assert attention(executable.plan) == {("tiled", "tiled", "math")}
    assert counts == {"match": 1, "recover": 1}
