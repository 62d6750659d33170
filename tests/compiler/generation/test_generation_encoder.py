"""Encoders of generations: planned with their step, compared at the logits, counted in seconds and bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import steps_once
from generation_models import bare, captured, ids, more, tiny
from torch import nn
from torch_formats import where_there

import effcompile
from effcompile.backends.torch import TorchLowered
from effcompile.backends.torch.backend import TorchEager
from effcompile.backends.torch.called import Called
from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.core.torch_compat import has_onednn, is_packed
from effcompile.ir.formats import BF16, FP32, Form
from effcompile.machine.target import linear_call
from effcompile.ops import row_program
from effcompile.passes import Choice, Option
from effcompile.proof.generation.check import checks, told_by
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.search.generation.joined import joined, joined_inputs
from effcompile.search.generation.text import calibration_texts
from effcompile.search.regimes import Regime, merged
from effcompile.sites.parts import linears

GOAL: dict[str, Any] = {"mode": "generation", "context": 24, "prompt": 4, "new": 8, "backend": "torch-eager"}


@pytest.fixture(scope="module", autouse=True)
def _steps() -> Iterator[None]:
    with steps_once():
        yield


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_its_graphs_together_are_the_model(kind: str) -> None:
    model, step = captured(kind)
    given = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 6, seed=2)}
    texts, _ = calibration_texts(model, step, [((), given)], 24)
    whole = joined(step, texts[0])
    _, inputs = joined_inputs(step, texts[0])
    with torch.no_grad():
        (found,) = whole.module(*torch.utils._pytree.tree_leaves(inputs))
        torch.testing.assert_close(found, model(**given).logits, rtol=1e-4, atol=1e-5)
    names = [site.site for site in linears(whole)]
    assert len(set(names)) == len(names)  # none of a graph is taken for another's
    of_parts = {s.site for part in (step.encoder, step.source, step.program) for s in linears(part)}  # type: ignore[arg-type]
    assert set(names) == of_parts


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_keys_of_cross_attention_are_made_without_the_layers(kind: str) -> None:
    step = captured(kind)[1]
    assert step.source is not None
    assert {s.site.rpartition(".")[2] for s in linears(step.source)} <= {"k", "v", "k_proj", "v_proj"}


@pytest.fixture(scope="module")
def least() -> tuple[nn.Module, GenerationExecutable]:
    """A model whose table encoder, decoder and head share, planned for least memory."""
    model = tiny("t5", d_model=64, d_kv=16, d_ff=96)
    assert model.shared.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight  # type: ignore[union-attr]
    goal = {**GOAL, "max_error": 0.5, "minimize": "memory"}
    return model, effcompile.optimize(model, inputs={"input_ids": ids(2, 40)}, **goal)


def test_its_linears_are_decided_and_found(least: tuple[nn.Module, GenerationExecutable]) -> None:
    decisions = [d for d in least[1].plan.decisions if d.site.startswith("encoder.") and d.kind == "linear"]
    assert decisions
    assert all(d.option == d.applied for d in decisions)
    assert any(d.option != "fp32" and d.cost.error_squared > 0 for d in decisions)
    found = {site: form.name for site, form in least[1].parts["encoder"].applied.items()}
    assert {d.site: d.option for d in decisions}.items() <= found.items()


def test_bytes_are_those_of_all_graphs(least: tuple[nn.Module, GenerationExecutable]) -> None:
    """A table that three of them read once, and in fp32: the encoder looks it up."""
    plan = least[1].plan
    assert plan.predicted is not None
    assert plan.measured is not None
    assert plan.predicted.weight_bytes == pytest.approx(plan.measured.weight_bytes, rel=0.02)
    graphs = [part.run for part in least[1].parts.values() if isinstance(part, TorchLowered)]
    assert len(graphs) == len(least[1].parts)
    assert _held_by(graphs) == pytest.approx(plan.measured.weight_bytes, rel=0.05)


@pytest.mark.skipif(not has_onednn(), reason="nothing is packed")
@pytest.mark.parametrize("dtype", [torch.float32, where_there("bf16", value=torch.bfloat16)])
def test_what_onednn_packed_is_counted(dtype: torch.dtype) -> None:
    """Such a weight has no storage to ask for."""
    weight = torch.randn(24, 40, dtype=dtype)
    graph = nn.Module()
    graph.register_buffer("plain", weight)
    graph.register_buffer("seen", weight.t())
    graph.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(weight, 8))
    assert _held_by([graph]) == 2 * weight.nbytes


def _held_by(graphs: Sequence[Any]) -> int:
    """Bytes of all that they hold, each memory once; what oneDNN packed, which it may by what was measured
    as fastest, has none to ask for.
    """
    held = dict[tuple[bool, int], int]()
    for tensor in (t for graph in graphs for t in (*graph.parameters(), *graph.buffers())):
        if is_packed(tensor):
            held[True, id(tensor)] = tensor.nbytes
        else:
            held[False, tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())


def test_its_seconds_are_told(least: tuple[nn.Module, GenerationExecutable]) -> None:
    assert any("the encoder takes" in str(note) for note in least[1].plan.notes)


def test_a_saved_one_says_the_same(least: tuple[nn.Module, GenerationExecutable], tmp_path: Path) -> None:
    model, executable = least
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    said = executable.generate(ids(2, 9), **how)
    assert torch.equal(effcompile.load(executable.save(tmp_path / "out")).generate(ids(2, 9), **how), said)
    again = effcompile.optimize(model, inputs={"input_ids": ids(2, 40)}, plan=executable.plan, **GOAL)
    assert torch.equal(again.generate(ids(2, 9), **how), said)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_saved_one_runs_as_it_was_planned(kind: str, tmp_path: Path) -> None:
    """By the same kernels, not operator by operator: the same numbers, in the seconds that were measured."""
    _, fast = bare(captured(kind))
    opened = effcompile.load(fast.save(tmp_path / "out"))
    asked = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 6, seed=2)}
    found, wanted = opened(**asked), fast(**asked)
    assert torch.equal(found.encoder_last_hidden_state, wanted.encoder_last_hidden_state)
    assert torch.equal(found.logits, wanted.logits)
    assert isinstance(opened.lowered.encoder, Called) and isinstance(opened.lowered.source, Called)


def test_an_encoder_that_errs_is_found() -> None:
    """The check gives the decoder what the lowered encoder makes, and not the model's own."""
    model, executable = bare(captured("t5"))
    texts, _ = calibration_texts(model, captured("t5")[1], [((), {"input_ids": ids(2, 9)})], 24)
    goal = Goal.of(mode="generation", context=24)
    told = told_by(model, texts, goal)
    assert all(check.passed for check in checks(executable.stepper, model, told, goal))
    right = executable.lowered.encoder
    assert right is not None
    step = replace(executable.lowered, encoder=lambda *flat: [right(*flat)[0] * 1.1])
    executable.stepper.step = step
    found = checks(executable.stepper, model, told, goal)
    executable.stepper.step = executable.lowered
    assert not any(check.passed for check in found)


@pytest.mark.parametrize(("kind", "batch", "source"), [("t5", 1, 0), ("bart", 3, 40), *more(("bart", 1, 0))])
def test_peaks_are_foreseen_to_the_byte(kind: str, batch: int, source: int) -> None:
    """With the encoder's output, which is held while tokens are written."""
    inputs = {"input_ids": ids(1, source)} if source else None
    goal = {**GOAL, "context": 64, "batch": batch}
    plan = effcompile.optimize(captured(kind)[0], inputs=inputs, **goal).plan
    assert plan.predicted is not None
    assert plan.measured is not None
    assert plan.predicted.peak_bytes == plan.measured.peak_bytes


def test_exact_plans_leave_it_as_it_is() -> None:
    plan = effcompile.plan(captured("bart")[0], {"input_ids": ids(1, 9)}, **GOAL)
    assert not [d for d in plan.decisions if d.site.startswith("encoder.")]


def test_what_one_graph_does_not_have_another_may() -> None:
    """Regimes of one graph decide together, those of another for themselves."""
    program = captured("t5")[1].program

    def choice(site: str, seconds: float) -> Choice:
        options = tuple(
            Option(form=Form(weights=held), cost=Cost(seconds=seconds), by="") for held in (FP32, BF16)
        )
        return Choice(site=site, kind="linear", baseline="fp32", options=options)

    regimes = [
        Regime(name="prefill", program=program, calls=2),
        Regime(name="decode", program=program, calls=10),
        Regime(name="encoder", program=program, graph="encoder"),
    ]
    found = {
        each.site: each.options[0].cost.seconds
        for each in merged(
            regimes, [[choice("a", 1.0), choice("only", 1.0)], [choice("a", 3.0)], [choice("b", 5.0)]]
        )
    }
    assert found == {"a": 32.0, "b": 5.0}


@pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")
def test_a_small_linear_of_few_rows_is_not_offered_in_bf16() -> None:
    """It would end the region that its neighbours are in."""
    lacks = TorchEager().lacks
    assert "ends the call" in str(lacks(linear_call(BF16, (1, 384, 384))))
    assert "ends the call" not in str(lacks(linear_call(BF16, (64, 384, 384))))
    assert "ends the call" not in str(lacks(linear_call(BF16, (1, 4096, 4096))))
