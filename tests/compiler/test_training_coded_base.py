"""LoRA on a base that the plan holds as codes: gradients, memory, peft's files, and the plan carried out
again.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from train_helpers import Batch

import effcompile
from effcompile import bucketed
from effcompile.compiler import Request, TrainingExecutable, optimize_training, plan_training
from effcompile.core.errors import FormatError, GuardError, InfeasibleError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.resident import resident_bytes
from effcompile.modes import carry_out
from effcompile.ops.frozen_codes import CodedWeight, encode, expand_codes
from effcompile.passes.training import frozen
from effcompile.passes.training.frozen import form_in
from effcompile.proof.training.alive import alive_bytes
from effcompile.report.groups import saved_bytes
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
#: One way to compute everything else.
PASSES = ["no-pointwise", "no-loss_head", "no-precision", "states.offload=false", "states.eight_bit=false"]
RATE = 1e-2


def llama() -> tuple[nn.Module, Batch]:
    """A Llama with LoRA on queries and values, few tokens: most of its bytes are frozen linears."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 32, (1, 4))
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    return peft.get_peft_model(hf.LlamaForCausalLM(config), lora).train(), {"input_ids": ids, "labels": ids}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def planned(
    model: nn.Module, batch: Batch, budget: int | None, max_error: float = 0.03, **asked: Any
) -> TrainingExecutable:
    goal = Goal(mode="training", memory=budget, max_error=max_error)
    return optimize_training(model, (), batch, goal=goal, **{"passes": PASSES, "optimizer": sgd, **asked})


def budget_of(model: nn.Module, batch: Batch) -> int:
    """Less than the step takes with its weights as given, however little it keeps."""
    plan = plan_training(model, (), batch, goal=Goal(mode="training"), passes=PASSES, optimizer=sgd)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return plan.predicted.peak_bytes - frozen // 4  # type: ignore[operator]


def rounded(model: nn.Module, form: str, names: list[str]) -> nn.Module:
    """A copy whose named weights are rounded, and else as they were."""
    made = copy.deepcopy(model)
    for name in names:
        weight = made.get_parameter(name)
        weight.data = expand_codes(encode(weight, form), tuple(weight.shape), form, weight.dtype)
    return made


def coded_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if isinstance(p, CodedWeight)]


def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@dataclass(frozen=True)
class TakenUp:
    """A model that was planned in little memory, and what it was before."""

    model: nn.Module
    batch: Batch
    original: nn.Module
    made: TrainingExecutable
    budget: int
    before: int

    @property
    def names(self) -> list[str]:
        return coded_names(self.model)


@cache
def taken_up() -> TakenUp:
    model, batch = llama()
    original, budget, before = copy.deepcopy(model), budget_of(model, batch), resident_bytes(model)
    return TakenUp(model, batch, original, planned(model, batch, budget), budget, before)


def test_a_base_is_held_as_codes_where_only_that_fits() -> None:
    had = taken_up()
    plan, frozen = had.made.plan, sum(had.original.get_parameter(name).nbytes for name in had.names)
    held = sum(had.model.get_parameter(name).packed.nbytes for name in had.names)  # type: ignore[attr-defined]
    decision = next(d for d in plan.decisions if d.by == "frozen")
    assert plan.parameters == sum(p.numel() for p in had.original.parameters())
    assert decision.option == "int8" and decision.baseline == "as given" and len(had.names) == 5
    assert frozen - held == had.before - resident_bytes(had.model)
    assert saved_bytes(decision) == frozen - held
    nf4 = next(d for d in plan.declined if d.by == "frozen" and d.option == "nf4")
    assert "rounds the weights by" in words(nf4.reason)
    assert any("frozen weights are held in int8" in words(note) for note in plan.notes)


def test_its_error_is_measured_its_peak_within_the_budget_and_the_weights_as_given_are_gone() -> None:
    had = taken_up()
    check, measured = had.made.plan.checks[0], had.made.plan.measured
    assert 0 < check.error <= 0.03 and had.made.plan.predicted.error is None
    assert measured is not None and measured.peak_bytes is not None and measured.peak_bytes <= had.budget
    assert alive_bytes("cpu", had.model) == resident_bytes(had.model) < had.before // 2


def test_steps_and_evaluation_are_those_of_the_rounded_base() -> None:
    had = taken_up()
    oracle = rounded(had.original, "int8", had.names)
    theirs = sgd([p for p in oracle.parameters() if p.requires_grad])
    assert had.made.optimizer is not None
    for _ in range(3):
        assert step(had.made, had.batch, had.made.optimizer) == pytest.approx(
            step(oracle, had.batch, theirs), rel=1e-5
        )
    for (name, ours), wanted in zip(had.model.named_parameters(), oracle.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6, msg=name)
    had.made.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            had.made(**had.batch).logits, oracle.eval()(**had.batch).logits, rtol=1e-4, atol=1e-5
        )
    had.made.train()


def test_adapters_are_saved_and_load_onto_the_base_as_it_was(tmp_path: Path) -> None:
    had = taken_up()
    had.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    again = peft.PeftModel.from_pretrained(llama()[0].unload(), str(tmp_path / "adapter"))  # type: ignore[operator, arg-type]
    assert all(torch.equal(p, had.model.get_parameter(n)) for n, p in again.named_parameters() if "lora" in n)


def test_a_copy_has_codes_and_what_reads_or_writes_the_weights_that_are_not_there_is_told() -> None:
    had = taken_up()
    twin = copy.deepcopy(had.made)
    assert coded_names(twin) == had.names
    with pytest.raises(UsageError, match="held in int8, as an earlier plan"):
        planned(had.model, had.batch, None)
    with pytest.raises((GuardError, RuntimeError), match="held in int8"):
        twin.merge_and_unload()
    name = had.names[0]
    with pytest.raises(GuardError, match="held in int8"):
        twin.get_parameter(name).data = had.original.get_parameter(name).data
    twin.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(
        had.original.get_parameter(name), requires_grad=False
    )
    with pytest.raises(GuardError, match="no longer held in int8"):
        twin(**had.batch)


def test_the_plan_is_carried_out_again_without_solving() -> None:
    had, (fresh, batch) = taken_up(), llama()
    plan = had.made.plan
    second = optimize_training(fresh, (), batch, goal=plan.goal, plan=plan, optimizer=sgd)
    assert coded_names(fresh) == had.names and second.plan.checks[0].error == pytest.approx(
        plan.checks[0].error, rel=1e-3
    )


def test_a_form_that_errs_more_than_is_allowed_when_it_is_run_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = llama()
    monkeypatch.setattr(frozen, "rounding_of", lambda weights, form: 0.0)  # so that only running it shows
    with pytest.raises(InfeasibleError, match="the whole gradient's relative error was"):
        planned(model, batch, budget_of(model, batch), 0.005, passes=[*PASSES, "frozen.forms=nf4"])
    assert not coded_names(model)


def test_an_exact_goal_and_a_roomy_budget_leave_the_base_as_it_is() -> None:
    model, batch = llama()
    for asked in ({"max_error": 0.0}, {"max_error": 0.03}):
        made = planned(model, batch, None, **asked)  # type: ignore[arg-type]
        assert not coded_names(model) and all(
            d.option == "as given" for d in made.plan.decisions if d.by == "frozen"
        )


SHAPES = [(1, 4), (1, 3)]


def of_several_shapes(model: nn.Module, batch: Batch, budget: int | None, **asked: Any) -> Any:
    asked = {"passes": PASSES, "optimizer": sgd, "shapes": SHAPES, **asked}
    return effcompile.optimize(model, batch, mode="training", memory=budget, max_error=0.03, **asked)


@pytest.fixture(scope="module")
def with_shapes() -> tuple[Any, TakenUp]:
    model, batch = llama()
    original, budget, before = copy.deepcopy(model), budget_of(model, batch), resident_bytes(model)
    made = of_several_shapes(model, batch, budget)
    return made, TakenUp(model, batch, original, made, budget, before)


def test_several_shapes_hold_the_base_once_in_one_form(with_shapes: tuple[Any, TakenUp]) -> None:
    made, had = with_shapes
    assert [form_in(step.plan) for step in made.steps.values()] == ["int8"] * 2 and len(had.names) == 5
    assert alive_bytes("cpu", had.model) == resident_bytes(had.model) < had.before // 2
    assert not any(step.runner.codes for step in made.steps.values())
    assert all(step.plan.measured.peak_bytes <= had.budget for step in made.steps.values())
    oracle = rounded(had.original, "int8", had.names)
    theirs = sgd([p for p in oracle.parameters() if p.requires_grad])
    for tokens in (4, 3, 2, 5, 4):
        ids = torch.randint(1, 32, (1, tokens))
        given = {"input_ids": ids, "labels": ids}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = step(made, given, made.optimizer)
        assert ours == pytest.approx(step(oracle, given, theirs), rel=1e-5)
        eagerly = any("runs the original PeftModel" in str(each.message) for each in said)
        assert eagerly == (tokens == 5)


def test_its_plan_of_several_shapes_is_carried_out_again(
    with_shapes: tuple[Any, TakenUp], tmp_path: Path
) -> None:
    plan = effcompile.Plan.load(with_shapes[0].save(tmp_path) / "plan.json")
    fresh, batch = llama()
    again = effcompile.optimize(fresh, batch, plan=plan, shapes=SHAPES, optimizer=sgd)
    assert coded_names(fresh) == with_shapes[1].names and again.plan.decisions == plan.decisions
    others = copy.deepcopy(plan.settings["buckets"])
    for decision in others["others"]["1x3"]["decisions"]:
        if decision["by"] == "frozen":
            decision["option"] = "nf4"
    with pytest.raises(FormatError, match="hold frozen weights as int8, nf4; one model has them in one form"):
        effcompile.optimize(
            llama()[0], batch, plan=plan.with_changes(settings={"buckets": others}), shapes=SHAPES
        )


def test_weights_may_be_said_not_to_stay_as_given() -> None:
    model, batch = llama()
    goal = Goal(mode="training", max_error=0.03)
    for form, found in (("int8", "int8"), ("nf4", None)):
        passes = [*PASSES, f"frozen.forms={form}", "frozen.as_given=false"]
        assert form_in(plan_training(model, (), batch, goal=goal, optimizer=sgd, passes=passes)) == found


def test_where_one_shape_cannot_have_the_form_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, batch), carried = llama(), carry_out

    def fails(asked: Request, *given: Any, **how: Any) -> Any:
        """The smaller shape's error in codes is above what is allowed, as shows when it is run."""
        of_codes = given[2]["input_ids"].shape[1] == 3 and "no-frozen" not in (asked.passes or ())
        return carried(
            replace(asked, passes=[*(asked.passes or ()), "no-frozen"] if of_codes else asked.passes),
            *given,
            **how,
        )

    monkeypatch.setattr(bucketed, "carry_out", fails)
    passes = [*PASSES, "frozen.as_given=false"]
    made = of_several_shapes(model, batch, None, passes=passes)
    assert [form_in(each.plan) for each in made.steps.values()] == [None] * 2 and not coded_names(model)
    step(made, batch, made.optimizer)
