"""What a plan of generation declares, decides and measures: one memory, one error, both regimes."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import steps_once
from generation_models import ids, more, tiny
from torch import nn

import effcompile
from effcompile.backends.torch import TorchLowered
from effcompile.core.findings import TokenRates
from effcompile.core.units import format_bytes
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall
from effcompile.ops.append import lengthened
from effcompile.proof.generation import ends, measured
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.search.search import GAP

#: Of a machine whose figures are known: no kernel is timed.
HOW: dict[str, Any] = {
    "mode": "generation",
    "target": "cpu-generic",
    "backend": "torch-eager",
    "context": 96,
    "prompt": 48,
    "new": 16,
}


def dear(backend: str, call: KernelCall) -> float | None:
    """Fewer bits cost more, whatever kernels this machine has for them."""
    modelled = GENERIC.roofline(call)
    dearer = 1.0 if call.format is None else 1 + (32 - call.format.bits) / 4
    return None if modelled is None else modelled[0] * dearer


GENERIC = load_target("cpu-generic")
DEAR = replace(GENERIC, probe=dear)


@pytest.fixture(scope="module", autouse=True)
def _shared_steps() -> Iterator[None]:
    with steps_once():
        yield


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", num_hidden_layers=1, vocab_size=256, hidden_size=64)


@pytest.fixture(scope="module")
def exact(llama: nn.Module) -> GenerationExecutable:
    return effcompile.optimize(llama, **HOW)


def test_an_exact_plan_says_what_was_measured(exact: GenerationExecutable, llama: nn.Module) -> None:
    plan = exact.plan
    assert plan.met
    assert all(check.passed for check in plan.checks)
    assert {check.name for check in plan.checks} >= {"prefill in one call", "prefill in chunks"}
    assert plan.measured is not None
    assert plan.measured.seconds is not None
    read = [
        *llama.parameters(),
        *(buffer for name, buffer in llama.named_buffers() if "original" not in name),
    ]
    assert plan.measured.weight_bytes == sum(tensor.nbytes for tensor in read)
    assert any(str(note).startswith("prefill ") for note in plan.notes)
    text = ids(2, 9)
    assert torch.equal(exact.generate(text, max_new_tokens=40), llama.generate(text, max_new_tokens=40))


def test_the_peak_holds_weights_and_the_whole_cache(exact: GenerationExecutable) -> None:
    """Both are known to the byte; what is above them is workspace."""
    peak, weights = exact.plan.measured.peak_bytes, exact.plan.measured.weight_bytes
    cache = exact.lowered.layout.nbytes(96, 1)
    assert weights + cache < peak < weights + cache + (2 << 20)


def test_a_front_is_of_plans_at_each_memory(llama: nn.Module) -> None:
    text, asked = {"input_ids": ids(2, 40)}, {**HOW, "max_error": 0.2, "target": DEAR}
    front = effcompile.frontier(llama, text, points=3, **asked)
    sizes = [plan.predicted.peak_bytes for plan in front]
    times = [plan.predicted.seconds for plan in front]
    assert len(front) > 1
    assert sizes == sorted(sizes) and times == sorted(times, reverse=True)
    assert front[-1].predicted.seconds == effcompile.plan(llama, text, **asked).predicted.seconds
    for plan, size in zip(front, sizes, strict=True):
        assert size > plan.predicted.weight_bytes + 96 * 2 * 64 * 2  # the cache of the whole context
        alone = effcompile.plan(llama, text, memory=size, **asked)
        assert alone.predicted.seconds <= plan.predicted.seconds * (1 + GAP)  # as far as it is proven
        assert alone.predicted.peak_bytes <= size


def test_less_memory_takes_fewer_bits_and_the_peak_is_within_it(
    exact: GenerationExecutable, llama: nn.Module
) -> None:
    memory = int(exact.plan.measured.peak_bytes * 0.8)
    planned = effcompile.optimize(
        llama, memory=memory, max_error=0.2, calibration=[{"input_ids": ids(2, 40)}], **HOW
    )
    assert planned.plan.met
    assert planned.plan.measured.peak_bytes <= memory
    assert {decision.option for decision in planned.plan.decisions} - {"fp32"}
    assert isinstance(planned.parts["step"], TorchLowered)
    worst = max(check.error for check in planned.plan.checks)
    assert 0 < worst <= 0.2
    assert all("nats per token" in str(check.note) for check in planned.plan.checks)


def test_a_saved_plan_is_carried_out_again(
    exact: GenerationExecutable, llama: nn.Module, tmp_path: Path
) -> None:
    """Its choices stay, and what was measured is of this run; as the report advises."""
    small = effcompile.optimize(
        llama, max_error=0.2, passes=["quantize"], calibration=[{"input_ids": ids(2, 40)}], **HOW
    )
    small.plan.save(tmp_path / "plan.json")
    again = effcompile.optimize(llama, plan=str(tmp_path / "plan.json"))
    assert again.plan.options() == small.plan.options() != exact.plan.options()
    text = ids(2, 9)
    assert torch.equal(again.generate(text, max_new_tokens=12), small.generate(text, max_new_tokens=12))
    assert again.plan.met
    assert [type(note) for note in again.plan.notes].count(TokenRates) == 1
    assert [candidate.backend for candidate in again.plan.candidates] == ["torch-eager"]


def test_a_plan_of_another_model_is_refused(exact: GenerationExecutable) -> None:
    with pytest.raises(effcompile.FormatError, match="made for another model"):
        effcompile.optimize(
            tiny("llama", num_hidden_layers=2, vocab_size=256, hidden_size=64), plan=exact.plan
        )


def test_what_does_not_fit_says_the_largest_context_that_does(
    exact: GenerationExecutable, llama: nn.Module
) -> None:
    memory = exact.plan.measured.weight_bytes + exact.lowered.layout.nbytes(96, 1) // 2
    with pytest.raises(effcompile.InfeasibleError, match="context") as raised:
        effcompile.plan(
            copy.deepcopy(llama),
            {"input_ids": ids(1, 8)},
            memory=memory,
            **{**HOW, "context": 512, "prompt": 48},
        )
    assert "context" in str(raised.value)


def test_what_running_took_beside_is_told_apart_from_what_was_asked_for(
    exact: GenerationExecutable, llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime's peak is measured: the limit that is named stays the caller's, and the weights their own."""
    assert exact.plan.predicted is not None and exact.plan.predicted.peak_bytes is not None
    memory, over = exact.plan.predicted.peak_bytes + (100 << 10), 300 << 10
    monkeypatch.setattr(measured, "peak_bytes", lambda *given: memory + over)
    with pytest.raises(effcompile.InfeasibleError) as raised:
        effcompile.optimize(copy.deepcopy(llama), memory=memory, **HOW)
    said = str(raised.value)
    assert said.startswith(f"No plan is within peak memory {format_bytes(memory)}. That counts the 300 KiB")
    assert f"smallest weights within the error ({format_bytes(exact.plan.predicted.weight_bytes)})" in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"context": 4096}, "positions for: 512"),
        ({"backend": "torch-inductor"}, "does not run generation"),
        ({"context": None, "prompt": None, "new": None}, "needs context"),
    ],
)
def test_requests_that_are_refused_in_words(llama: nn.Module, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(effcompile.UsageError, match=said):
        effcompile.optimize(llama, **{**HOW, **asked})


def test_the_batch_is_rows_of_the_cache() -> None:
    from effcompile.core.goal import Goal
    from effcompile.search.request import Request

    goal = Goal.of(mode="generation", context=8)
    assert Request(goal=goal, batch=4).goal.batch == 4
    assert Request(goal=goal, batch="4").goal.batch == 4
    with pytest.raises(effcompile.UsageError, match="batch"):
        Request(goal=goal, batch="auto")


@pytest.mark.parametrize(
    ("kind", "context", "batch"),
    [
        ("gemma3_text", 700, 1), ("jamba", 40, 3),
        *more(("llama", 64, 1), ("mamba", 64, 1)),
        *more(*((kind, 64, 1) for kind in ("gpt2", "gemma3_text", "jamba", "lfm2"))),
        *more(("llama", 700, 1), ("mamba", 700, 1), ("falcon_h1", 40, 3)),
    ],
)  # fmt: skip
def test_an_exact_plans_peak_is_predicted_to_the_byte(kind: str, context: int, batch: int) -> None:
    """The oracle is torch's allocator, over a prompt of the whole context; 700 tokens are two chunks."""
    model = tiny(kind, **({"n_positions": 1024} if kind == "gpt2" else {"max_position_embeddings": 1024}))
    executable = effcompile.optimize(
        model, {"input_ids": ids(2, 24)}, mode="generation", context=context, batch=batch, prompt=16, new=4,
        backend="torch-eager", passes=["rows"],
    )  # fmt: skip
    assert executable.plan.measured is not None
    assert executable.plan.measured.peak_bytes == executable.plan.predicted.peak_bytes


@pytest.mark.parametrize("backend", [None, "triton", "torch-eager"])
def test_a_gpu_that_is_not_here_is_planned_for(backend: str | None, llama: nn.Module) -> None:
    """By prices of its data sheet; our groups and a cache of 8 bits are the triton backend's alone there."""
    how = {**HOW, "max_error": 0.2, "target": "h100-sxm", "backend": backend}
    plan = effcompile.plan(llama, {"input_ids": ids(2, 40)}, **how)
    assert plan.backend == (backend or "triton") and "not calibrated" in plan.target_line
    assert plan.measured is None
    forms = {d.option for d in plan.decisions if d.kind == "linear"}
    held = [d.option for d in plan.decisions if d.kind == "cache"]
    if plan.backend == "triton":
        assert forms & {"int4_groups", "int8_groups"} and held
    else:
        assert not forms & {"int4_groups", "int8_groups"} and not held


def test_a_peak_is_that_of_the_whole_prompt_whose_ends_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the timeline; 1,100 tokens are three chunks, the second of 512."""
    passed = []

    def longer(past: torch.Tensor, more: int, capacity: int) -> torch.Tensor:
        passed.append(more)
        return lengthened(past, more, capacity)

    monkeypatch.setattr(ends, "lengthened", longer)
    model = tiny("llama", max_position_embeddings=2048)
    made = effcompile.optimize(model, {"input_ids": ids(2, 24)}, passes=["rows"], **{**HOW, "context": 1100})
    assert set(passed) == {512}
    assert made.plan.measured.peak_bytes == made.plan.predicted.peak_bytes
