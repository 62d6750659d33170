"""From a model with eager attention to an artifact that holds the planned form, with quantised linears
beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import effcompile
from effcompile.backends.onnxruntime import OnnxRuntime
from effcompile.backends.torch import TorchEager
from effcompile.core.errors import FormatError
from effcompile.core.mask import Edge, MaskForm
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.machine.target import KernelCall
from effcompile.passes.training import fused_attention
from effcompile.report.reasons import words
from effcompile.search import pricing
from effcompile.sites.attention import closed_masks, normalise, rewrite

pytestmark = pytest.mark.usefixtures("shared_programs")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def mistral() -> tuple[MistralForCausalLM, dict[str, torch.Tensor]]:
    """Grouped heads, a window of 6, and a padded row."""
    torch.manual_seed(0)
    config = MistralConfig(
        **SIZES,
        num_key_value_heads=2,
        sliding_window=6,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    return MistralForCausalLM(config).eval(), {
        "input_ids": torch.randint(0, 64, (2, 24)),
        "attention_mask": mask,
    }


def fast(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one kernel seem to cost nothing, and all others the same."""

    def measure(_: TorchEager, call: KernelCall) -> float | None:
        return (
            1e-9
            if call.kernel == kernel
            else 1e-3
            if call.kernel.startswith(("attention", "linear/int8"))
            else 1e-2
        )

    monkeypatch.setattr(TorchEager, "measure", measure)


def attention(plan: Any) -> set[tuple[str, str, str]]:
    return {(d.option, d.applied, d.baseline) for d in plan.decisions if d.kind == "attention"}


@pytest.fixture(scope="module")
def planned(mistral: Any) -> Callable[[str], Any]:
    """The model planned in a form, once for all tests."""

    @cache
    def made(form: str) -> Any:
        model, inputs = mistral
        with pytest.MonkeyPatch.context() as patch:
            fast(f"attention/{form}", patch)
            return effcompile.optimize(model, inputs=inputs, backend="torch-eager")

    return made


@pytest.mark.parametrize("form", ["tiled", "math"])
def test_the_planned_form_is_what_the_artifact_holds(
    form: str, mistral: Any, planned: Callable[[str], Any], tmp_path: Path
) -> None:
    (model, inputs), executable = mistral, planned(form)
    assert attention(executable.plan) == {(form, form, "math")}
    assert all(check.passed for check in executable.plan.checks)
    executable.save(tmp_path)
    found = TorchEager().open(tmp_path, executable.plan)(inputs)
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[0][seen], wanted[seen], rtol=1e-4, atol=1e-4)


def test_what_it_sees_is_in_the_plan_and_it_composes_with_int8(
    mistral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = mistral
    fast("attention/tiled", monkeypatch)
    executable = effcompile.optimize(model, inputs=inputs, backend="torch-eager", max_error=0.2)
    found = [d for d in executable.plan.decisions if d.kind == "attention"]
    assert (
        all(words(d.known).startswith("sees causal ∧ window 6 ∧ padding (attention_mask)") for d in found)
        and len(found) == 2
    )
    assert any(
        d.option.startswith("int8") and d.applied == d.option
        for d in executable.plan.decisions
        if d.kind == "linear"
    )
    again = effcompile.optimize(model, inputs=inputs, plan=executable.plan)
    assert attention(again.plan) == {("tiled", "tiled", "math")} and all(
        check.passed for check in again.plan.checks
    )


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The graphs in which attentions were looked for, and (program's graph, operand) of every mask that was
    recovered.
    """
    found: dict[str, list[Any]] = {"match": [], "recover": []}

    def noting(name: str, function: Callable[..., Any], what: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found[name].append(what(*args))
            return function(*args, **kwargs)

        return noted

    for module in (normalise, rewrite, fused_attention):
        monkeypatch.setattr(module, "match", noting("match", module.match, lambda graph: graph))
    recover = noting("recover", closed_masks.recover_mask, lambda program, node: (program.graph, node))
    monkeypatch.setattr(closed_masks, "recover_mask", recover)
    return found


def test_the_graph_is_searched_once_and_a_mask_recovered_once(
    mistral: Any, searched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers share one mask: pricing for two backends, lowering to both and reading back find no
    attention and no mask anew.
    """
    model, inputs = mistral
    both = [TorchEager(), OnnxRuntime()]
    monkeypatch.setattr(pricing, "usable_backends", lambda _: (both, {}))
    fast("attention/tiled", monkeypatch)
    executable = effcompile.optimize(model, inputs=inputs)
    assert {c.backend for c in executable.plan.candidates if c.predicted_seconds} == {
        "torch-eager",
        "onnxruntime",
    }
    assert {name: len(found) for name, found in searched.items()} == {"match": 1, "recover": 1}


def test_a_step_is_searched_once_per_form_and_its_mask_recovered_once(searched: Any) -> None:
    """A step as written and one with fused attentions are two graphs; micro-batches are captured
    as a third.
    """
    torch.manual_seed(0)
    config = MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=6, attn_implementation="eager", use_cache=False
    )
    model, ids = MistralForCausalLM(config).train(), torch.randint(0, 64, (2, 24))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    plan = effcompile.plan(model, inputs, mode="training", target="cpu-generic")
    assert any(
        d.kind == "attention" and words(d.known).startswith("sees causal ∧ window 6") for d in plan.decisions
    )
    assert len({id(graph) for graph in searched["match"]}) == len(searched["match"]), (
        "no graph is searched twice"
    )
    assert len(searched["recover"]) == 1


def test_the_choice_carries_its_mask_to_the_plan_the_artifact_and_back(
    mistral: Any, planned: Callable[[str], Any]
) -> None:
    (model, inputs), executable = mistral, planned("tiled")
    plan = Plan.from_dict(executable.plan.to_dict())
    forms = [d.form for d in plan.decisions if d.kind == "attention"]
    window = MaskForm(lo=Edge(offset=-5), hi=Edge(offset=0), valid=("attention_mask",), uniform_empty=True)
    assert [form and form.mask for form in forms] == [window] * 2
    found = [form for form in executable._lowered.applied.values() if form.word == "tiled"]
    assert len(found) == 2 and all(form.agrees(here) for form, here in zip(forms, found, strict=True) if form)
    wider = replace(window, lo=Edge(offset=-6))
    assert not any(Form(word="tiled", mask=wider).agrees(form) for form in found), (
        "what was read back is the mask itself"
    )
    other = tuple(
        replace(d, form=replace(d.form, mask=wider)) if d.form and d.form.mask else d for d in plan.decisions
    )
    with pytest.raises(FormatError, match=r"window 7.*in this model it sees causal ∧ window 6"):
        effcompile.optimize(model, inputs=inputs, plan=plan.with_changes(decisions=other))
