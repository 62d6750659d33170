"""Plans carried out on the kernels, in the interpreter in the place of a GPU: a small Llama's outputs, and a
training step's gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import programs_once
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import effcompile
from effcompile.backends.triton import attention, attention_launch, group_quant, linears, loss_head, rows
from effcompile.backends.triton.backend import Triton
from effcompile.compiler import measure
from effcompile.machine.target import KernelCall
from effcompile.proof.training import timed

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    with programs_once():
        yield


@pytest.fixture(scope="module")
def llama() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_key_value_heads=1, max_position_embeddings=64, attn_implementation="sdpa"
    )
    return LlamaForCausalLM(config).eval(), {
        "input_ids": torch.randint(0, 40, (1, 8)),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
    }


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter takes tells nothing: no more rounds than there must be."""
    monkeypatch.setattr(timed, "_TIMING_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_BUDGET", 0.0)
    monkeypatch.setattr(measure, "_LEAST", 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, by name."""
    names: list[str] = []
    watched = {
        loss_head: ("loss_head_rows",),
        group_quant: ("quantized_product",),
        rows: ("rms_norm_kernel", "swiglu_kernel", "rotary_kernel"),
    }
    for module, found in watched.items():
        for name in found:
            monkeypatch.setattr(module, name, Spy(getattr(module, name), names))
    for kind, (kernel, given) in attention_launch.KINDS.items():
        monkeypatch.setitem(attention_launch.KINDS, kind, (Spy(kernel, names), given))
    monkeypatch.setattr(attention, "_forms", {})  # they hold kernels
    return names


class Spy:
    def __init__(self, kernel: Any, names: list[str]) -> None:
        self.kernel, self.names, self.arg_names = kernel, names, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        self.names.append(self.kernel.__name__)
        return self.kernel[grid]


def test_a_plan_of_inference(llama: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = llama
    monkeypatch.setattr(Triton, "measure", lambda _, call: 1e-9 if call.kernel == "attention/tiled" else 1e-3)
    executable = effcompile.optimize(model, inputs=inputs, backend="triton", passes=["no-rows"])
    plan = executable.plan
    assert {d.applied for d in plan.decisions if d.kind == "attention"} == {"tiled"}
    assert "attention ×1; in its interpreter" in plan.settings["kernels"]
    assert "CUDA graph" not in plan.settings
    assert all(check.passed for check in plan.checks)
    launched.clear()
    with torch.no_grad():
        torch.testing.assert_close(executable(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert launched == ["attention_forward"]


#: The linears by K and N → the form that is made to seem cheap.
FORMS = {(32, 32): "w4", (32, 64): "w8", (64, 32): "int8_channel"}


def test_weights_in_codes(
    llama: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found in what was built, within the error that was predicted and measured; the kernel ran, not its
    stand-in.
    """
    model, inputs = llama
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))  # times that were made up for another test
    monkeypatch.setattr(
        Triton,
        "measure",
        lambda _, call: 1e-9 if call.kernel == f"linear/{FORMS.get(call.dims[1:3])}" else 1e-3,
    )
    plan = effcompile.optimize(model, inputs=inputs, backend="triton", max_error=0.3).plan
    found = [d.applied for d in plan.decisions if d.kind == "linear" and d.option in linears.FAMILIES]
    assert set(found) == set(linears.FAMILIES)
    assert all(check.passed for check in plan.checks)
    assert "quantized_linear ×" in plan.settings["kernels"]
    assert "quantized_product" in launched


def test_norms_gates_and_rotations(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned as cheaper, found in what was built, within an exact goal, and run by the kernels: each as
    often as the model has it.

    Qwen3 has all that a Llama has, and norms of each head's queries and keys.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES, num_key_value_heads=1, max_position_embeddings=64, head_dim=16, attn_implementation="sdpa"
    )
    model = Qwen3ForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(0, 40, (1, 8)), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    monkeypatch.setattr(Triton, "measure", lambda _, call: 1e-9 if call.kernel.startswith("rows/") else 1e-3)
    executable = effcompile.optimize(model, inputs=inputs, backend="triton", passes=["rows"])
    rowed = [d for d in executable.plan.decisions if d.kind == "rows"]
    assert {(d.option, d.applied) for d in rowed} == {("fused", "fused")}
    assert all(check.passed for check in executable.plan.checks)
    launched.clear()
    with torch.no_grad():
        torch.testing.assert_close(executable(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert sorted(launched) == sorted(["rms_norm_kernel"] * 5 + ["rotary_kernel"] * 2 + ["swiglu_kernel"])


def test_kernels_are_timed_where_they_run(launched: list[str]) -> None:
    assert Triton().measure(KernelCall("attention/tiled", (1, 1, 16, 16, 16, 8))) is not None
    assert "attention_forward" in launched
    assert Triton().measure(KernelCall("linear/fp32", (8, 16, 16))) is not None
    for form, kernel in (
        ("rms_norm", "rms_norm"),
        ("add_rms_norm", "rms_norm"),
        ("swiglu", "swiglu"),
        ("rotary", "rotary"),
    ):
        launched.clear()
        assert Triton().measure(KernelCall(f"rows/{form}", (16, 16))) is not None
        assert set(launched) == {f"{kernel}_kernel"}
    launched.clear()
    assert Triton().measure(KernelCall("linear/w4", (8, 64, 16, 32))) is not None
    assert Triton().measure(KernelCall("linear/int8_dynamic", (8, 16, 16))) is None
    assert Triton().measure(KernelCall("linear/w4", (8, 48, 16, 32))) is None
    assert Triton().measure(KernelCall("linear/w4", (8, 64, 16, 32))) is not None
    assert "quantized_product" in launched


def test_a_training_step(llama: Any, launched: list[str]) -> None:
    model, inputs = llama
    model = copy.deepcopy(model).train()
    executable = effcompile.optimize(model, inputs={**inputs, "labels": inputs["input_ids"]}, mode="training")
    assert any("Triton's kernels run attention" in str(note) for note in executable.plan.notes)
    assert {"attention_forward", "attention_dq", "attention_dkdv"} <= set(launched)
