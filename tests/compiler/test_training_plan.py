"""A step planned within its budget, run and verified; saved, applied again, and refused where it does not
fit.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import Batch, differing, eager, gpt2, measured, skips

from effcompile import compiler
from effcompile.backends.torch.training import StepRunner
from effcompile.compiler import optimize_training, plan_training
from effcompile.compiler.training import attempt
from effcompile.compiler.training import compile as training
from effcompile.core.cost import Cost
from effcompile.core.errors import (
    FormatError,
    InfeasibleError,
    InputsError,
    UnknownNameError,
    UsageError,
    VerificationError,
)
from effcompile.core.goal import Goal
from effcompile.ir.plan import Decision, Plan
from effcompile.machine.machines import load_target
from effcompile.report import figures

pytestmark = pytest.mark.usefixtures("quick_training")
EXACTLY = ["no-pointwise"]


def goal(memory: int | None = None, **fields: Any) -> Goal:
    return Goal(mode="training", memory=memory, **fields)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[nn.Module, Batch]]:
    return {"gpt2": gpt2(layers=2, n_positions=64), "skips": skips()}


def whole(made: Any, name: str) -> int:
    """The peak of the step that keeps everything."""
    model, batch = made[name]
    return plan_training(model, (), batch, goal=goal()).predicted.peak_bytes or 0


# ------------------------------------------------------------------ budgets


@pytest.mark.parametrize("name", ["gpt2", "skips"])
def test_predicted_and_measured_peaks_stay_within_every_budget(made: Any, name: str) -> None:
    model, batch = made[name]
    most = whole(made, name)
    with pytest.raises(InfeasibleError) as refused:
        optimize_training(model, (), batch, goal=goal(most // 3))
    least = int(refused.value.nearest["memory"])
    assert most // 3 < least <= most
    seconds = []
    for memory in (least, (least + most) // 2) if name == "gpt2" else (least, (least + most) // 2, most):
        executable = optimize_training(model, (), batch, goal=goal(memory), passes=EXACTLY)
        plan = executable.plan
        assert (
            plan.met
            and plan.over_memory is None
            and plan.measured
            and plan.measured.peak_bytes
            and plan.predicted.peak_bytes
        )
        assert max(plan.measured.peak_bytes, plan.predicted.peak_bytes) <= memory
        assert abs(plan.predicted.peak_bytes - plan.measured.peak_bytes) <= 0.02 * plan.measured.peak_bytes
        assert str(plan.checks[0].note) == "bit-identical" or plan.checks[0].error <= 1e-5
        assert plan.baseline.peak_bytes and plan.predicted.peak_bytes <= plan.baseline.peak_bytes
        seconds.append(plan.predicted.seconds)
        if all(d.option == d.baseline for d in plan.decisions if d.kind == "loss head"):
            # chunks are summed in another order
            found = measured(lambda: loss_of(executable(**batch)), model, 0)[0]  # noqa: B023
            wanted = eager(model, batch)
            # MKL's sums may depend on where a tensor lies: the sum of a table's two gradients
            assert differing(found, wanted) in ([], ["transformer.wte.weight"])
            for name, grad in wanted[1].items():
                torch.testing.assert_close(
                    found[1][name], grad, rtol=1e-6, atol=1e-6 * float(grad.abs().max())
                )
    assert seconds[-1] <= seconds[0] * 1.01


def test_the_least_memory_is_that_below_which_nothing_fits(made: Any) -> None:
    """Asked for nothing but least memory, the step takes what an impossible budget is answered with, and is
    the fastest of such.
    """
    model, batch = made["gpt2"]
    with pytest.raises(InfeasibleError) as refused:
        plan_training(model, (), batch, goal=goal(1), passes=EXACTLY)
    least = int(refused.value.nearest["memory"])
    smallest = plan_training(model, (), batch, goal=goal(minimize="memory"), passes=EXACTLY)
    assert (smallest.predicted.peak_bytes or 0) <= least < whole(made, "gpt2")
    within = plan_training(model, (), batch, goal=goal(least), passes=EXACTLY)
    assert (
        smallest.predicted.seconds == pytest.approx(within.predicted.seconds)
        and smallest.options() == within.options()
    )
    proven = replace(smallest.certificate, status="optimal within gap", gap=0.0)
    assert (
        "no plan is faster within the least memory that was found to do"
        in figures.proof(proven, smallest.goal)[0]
    )
    with pytest.raises(InfeasibleError):
        plan_training(model, (), batch, goal=goal(least - 1, minimize="memory"), passes=EXACTLY)


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def test_a_budget_below_the_parameters_is_infeasible_and_says_what_is_possible(made: Any) -> None:
    model, batch = made["skips"]
    size = sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(InfeasibleError, match=r"smallest feasible budget is .* bytes") as refused:
        plan_training(model, (), batch, goal=goal(size // 2))
    assert refused.value.nearest["memory"] > size and refused.value.binding


def test_the_plan_tells_what_it_decided(made: Any) -> None:
    model, batch = made["gpt2"]
    plan = plan_training(model, (), batch, goal=goal(int(0.93 * whole(made, "gpt2"))))
    sites = [d.site for d in plan.decisions if d.kind == "checkpoint"]
    assert sites == ["start", "transformer.h.0", "transformer.h.1", "end"]
    assert plan.measured is None and plan.checks == ()
    timeline = plan.memory_timeline
    assert timeline and timeline.peak_bytes == plan.predicted.peak_bytes == sum(timeline.parts.values())
    assert plan.certificate.sites == 4 and plan.certificate.gap <= 0.0101 and "z3" in plan.certificate.solver
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert any("not returned beside the loss: logits" in str(note) for note in plan.notes)


def test_planning_leaves_the_model_and_the_random_generator_alone(made: Any) -> None:
    model, batch = made["skips"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = torch.get_rng_state()
    executable = optimize_training(model, (), batch, goal=goal(), passes=EXACTLY)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert bool((model.head.weight.grad == 1).all()) and model.head.bias.grad is None and executable.training
    model.head.weight.grad = None


def test_a_frozen_part_needs_no_gradients() -> None:
    model, batch = gpt2(layers=2)
    free = plan_training(model, (), batch, goal=goal())
    model.transformer.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)  # tied with the embedding
    plan = optimize_training(model, (), batch, goal=goal(), passes=EXACTLY).plan
    assert plan.checks[0].passed and (plan.measured.peak_bytes or 0) < (free.predicted.peak_bytes or 0)


def test_a_loss_given_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)).train()
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))

    def loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, y) + 0 * inputs[0].sum()

    executable = optimize_training(model, (x,), {}, goal=goal(), loss=loss)
    assert executable.plan.checks[0].passed
    found = executable(x)
    assert torch.allclose(
        found if isinstance(found, torch.Tensor) else found.loss, nn.functional.cross_entropy(model(x), y)
    )
    found.backward()
    assert model[0].weight.grad is not None


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


def test_a_loss_takes_labels_that_the_forward_does_not() -> None:
    model, batch = Labelled().train(), {"x": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))}
    executable = optimize_training(
        model,
        (),
        batch,
        goal=goal(),
        loss=lambda outputs, inputs: nn.functional.cross_entropy(outputs, inputs["y"]),
    )
    executable(**batch).backward()
    ours = model.lin.weight.grad.clone()
    model.zero_grad()
    nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    assert torch.allclose(ours, model.lin.weight.grad)


def test_exact_plans_and_granted_errors_have_their_limits(made: Any) -> None:
    model, batch = made["skips"]
    for granted, limit in ((None, 1e-5), (0.01, 0.01)):
        plan = optimize_training(model, (), batch, goal=goal(max_error=granted)).plan
        assert plan.checks[0].limit == limit and plan.checks[0].error <= 1e-5


def test_a_loss_that_is_not_a_number_says_what_to_mend() -> None:
    model, batch = skips()
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
    with pytest.raises(VerificationError, match=r"own loss is nan at the example inputs.*Give other inputs"):
        optimize_training(model, (), batch, goal=goal())


def test_a_planned_step_that_differs_is_never_returned(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made["skips"]
    real = StepRunner.run_backward
    monkeypatch.setattr(StepRunner, "run_backward", lambda *args: tuple(g * 1.001 for g in real(*args)))
    with pytest.raises(VerificationError, match=r"differs from the model's own: largest at .* > 1.000e-05"):
        optimize_training(model, (), batch, goal=goal())


def test_autocast_is_planned_with_and_refused_without() -> None:
    model, batch = skips()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        executable = optimize_training(model, (), batch, goal=goal())
        assert executable.plan.checks[0].passed
        executable(**batch)
    with pytest.raises(InputsError, match="autocast"):
        executable(**batch)


# ------------------------------------------------------------------ passes, target, backend


def test_passes_can_be_chosen_and_misspelt_ones_are_told(made: Any) -> None:
    model, batch = gpt2(layers=1, dropout=0.0, vocab_size=331)
    ids = torch.randint(0, 331, (4, 32))
    batch = {"input_ids": ids, "labels": ids}

    def heads(passes: list[str] | None) -> set[str]:
        plan = plan_training(model, (), batch, goal=goal(), passes=passes)
        return {d.kind for d in (*plan.decisions, *plan.declined)}

    assert "loss head" in heads(None) and "loss head" not in heads(["no-loss_head"])
    model, batch = made["skips"]
    with pytest.raises(UnknownNameError, match="Did you mean 'checkpoint'"):
        plan_training(model, (), batch, goal=goal(), passes=["checkpiont"])
    with pytest.raises(UsageError, match="'quantize' is for the mode 'inference'"):
        plan_training(model, (), batch, goal=goal(), passes=["quantize"])
    for wrong in (["no-checkpoint"], ["checkpoint.points=many"], ["checkpoint.pionts=3"]):
        with pytest.raises(UsageError):
            plan_training(model, (), batch, goal=goal(), passes=wrong)


def test_without_groups_no_input_is_remade() -> None:
    model, batch = gpt2(layers=2, dropout=0.0)
    with pytest.raises(InfeasibleError) as grouped:
        plan_training(model, (), batch, goal=goal(1 << 10))
    with pytest.raises(InfeasibleError) as alone:
        plan_training(model, (), batch, goal=goal(1 << 10), passes=["checkpoint.groups=false"])
    assert grouped.value.nearest["memory"] <= alone.value.nearest["memory"]
    plan = plan_training(
        model, (), batch, goal=goal(int(alone.value.nearest["memory"])), passes=["checkpoint.groups=false"]
    )
    assert not any(d.settings.get("remade_from") for d in plan.decisions)


def test_another_machine_can_be_planned_for_and_not_run(made: Any) -> None:
    model, batch = made["skips"]
    h100 = load_target("h100-sxm")
    plan = plan_training(model, (), batch, goal=goal(), target=h100)
    assert plan.target == h100.name and any(
        "modelled from the target's peaks" in str(note) for note in plan.notes
    )
    with pytest.raises(UsageError, match="can be planned for it, not run"):
        optimize_training(model, (), batch, goal=goal(), target=h100)
    with pytest.raises(UsageError, match="runs on the backend 'torch'"):
        optimize_training(model, (), batch, goal=goal(), backend="onnxruntime")


# ------------------------------------------------------------------ saving, and applying again


@pytest.fixture(scope="module")
def saved(
    made: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[], Plan]:
    """The plan of `skips` that recomputes something, as it comes back from its file."""
    folder = tmp_path_factory.mktemp("plan")

    def load() -> Plan:
        if not (folder / "plan.json").exists():
            model, batch = made["skips"]
            most = whole(made, "skips")
            with pytest.raises(InfeasibleError) as refused:
                plan_training(model, (), batch, goal=goal(most // 3))
            memory = (int(refused.value.nearest["memory"]) + most) // 2
            optimize_training(model, (), batch, goal=goal(memory), passes=EXACTLY).save(folder)
        return Plan.load(folder / "plan.json")

    return load


def test_a_saved_plan_is_applied_without_solving(
    made: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = made["skips"]
    plan = saved()
    for module in (training, attempt):
        monkeypatch.setattr(module, "build_plan", lambda *_, **__: pytest.fail("planned again"))
    monkeypatch.setattr(
        "effcompile.search.training.cases.schedule", lambda *_, **__: pytest.fail("solved again")
    )
    monkeypatch.setattr(
        "effcompile.passes.training.checkpoint.joint_front", lambda *_, **__: pytest.fail("solved again")
    )
    executable = optimize_training(model, (), batch, goal=goal(), plan=plan, passes=EXACTLY)
    again = executable.plan
    assert (again.decisions, again.predicted) == (plan.decisions, plan.predicted)
    assert again.measured and again.measured.peak_bytes == plan.measured.peak_bytes and again.met
    assert differing(measured(lambda: executable(**batch), model, 0)[0], eager(model, batch)) == []


def test_a_plan_for_another_model_or_other_shapes_is_refused(made: Any, saved: Any) -> None:
    plan = saved()
    model, batch = made["skips"]
    small = {"x": batch["x"][:4], "y": batch["y"][:4]}
    wide = type(model)(layers=3).train()
    other, text = made["gpt2"]
    for subject, given in ((model, small), (wide, batch), (other, text)):
        with pytest.raises(FormatError, match="another model or other shapes"):
            optimize_training(subject, (), given, goal=goal(), plan=plan, passes=EXACTLY)


def block(site: str, **settings: Any) -> Callable[[Plan], Plan]:
    """A change of what one block is said to hold; None leaves a setting out."""

    def changed(plan: Plan) -> Plan:
        def edited(d: Decision) -> Decision:
            merged = {name: value for name, value in {**d.settings, **settings}.items() if value is not None}
            return replace(d, settings=merged) if (d.site, d.kind) == (site, "checkpoint") else d

        return replace(plan, decisions=tuple(map(edited, plan.decisions)))

    return changed


def more(**fields: Any) -> Callable[[Plan], Plan]:
    """One decision more."""
    given = {
        "site": "end",
        "option": "x",
        "baseline": "y",
        "by": "z",
        "cost": Cost(),
        "baseline_cost": Cost(),
        **fields,
    }
    return lambda plan: replace(plan, decisions=(*plan.decisions, Decision(**given)))


#: Broken plans. Each is refused.
TAMPERED: dict[str, Callable[[Plan], Plan]] = {
    "a block that is not there": more(
        site="layers.9", kind="checkpoint", settings={"keep": (), "remade_from": ""}
    ),
    "a block left out": lambda plan: replace(plan, decisions=plan.decisions[1:]),
    "an unknown value": block("layers.0", keep=("999.0",)),
    "a number for a value": block("layers.0", keep=(3,)),
    "a list for a value": block("layers.0", keep=((),)),
    "a text for names": block("layers.0", keep="0.0"),
    "nothing for names": block("layers.0", keep=None),
    "no blocks": lambda plan: replace(
        plan, decisions=tuple(d for d in plan.decisions if d.kind != "checkpoint")
    ),
    "an input remade from nowhere": block("layers.1", remade_from="layers.99"),
    "an input remade from a later block": block("layers.1", remade_from="layers.3"),
    "an input remade from the block itself": block("layers.1", remade_from="layers.1"),
    "the first block's input remade": block("layers.0", remade_from="layers.1"),
    "a run with a gap": block("layers.3", remade_from="layers.1"),
    "a number for a block": block("layers.1", remade_from=7),
    "another loss head": more(kind="loss head", settings={"form": "chunked", "chunks": 2}),
    "a loss head that does not exist": more(kind="loss head", settings={"form": ("whole",), "chunks": 2}),
    "in place without ties": more(kind="gradient", option="in place"),
    "chains that are no names": more(kind="element-wise", settings={"a": 3}),
    "nothing at all": lambda plan: replace(plan, decisions=()),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_plan_is_refused(made: Any, saved: Any, what: str) -> None:
    model, batch = made["skips"]
    plan = TAMPERED[what](saved())
    with pytest.raises(FormatError, match=r"[Pp]lan"):
        optimize_training(model, (), batch, goal=goal(), plan=plan, passes=EXACTLY)


def test_a_plan_of_version_1_is_refused_in_words(saved: Any) -> None:
    data = {**saved().to_dict(), "version": 1, "schedule": {"kept": {}}}
    with pytest.raises(FormatError, match=r"has plan version 1; this effcompile reads version 2. Plan again"):
        Plan.from_dict(data)


def test_a_schedule_that_keeps_too_much_for_its_budget_is_refused(made: Any, saved: Any) -> None:
    model, batch = made["skips"]
    plan = saved()
    tight = replace(plan, goal=goal((plan.predicted.peak_bytes or 0) - 1))
    with pytest.raises(FormatError, match="above its budget"):
        optimize_training(model, (), batch, goal=goal(), plan=tight, passes=EXACTLY)


def test_a_changed_but_sound_schedule_still_gives_the_models_own_gradients(made: Any, saved: Any) -> None:
    """Keeping less, and groups that no planner makes, cost time and bytes, never truth."""
    model, batch = made["skips"]
    plan = saved()
    changed = replace(plan, goal=goal())
    for d in plan.decisions:
        if d.kind == "checkpoint":
            origin = "layers.0" if d.site in ("layers.1", "layers.2") else ""
            changed = block(d.site, keep=d.settings["keep"][::2], remade_from=origin)(changed)
    executable = optimize_training(model, (), batch, goal=goal(), plan=changed, passes=EXACTLY)
    assert differing(measured(lambda: executable(**batch), model, 0)[0], eager(model, batch)) == []


def test_the_frontier_goes_from_the_least_budget_to_the_fastest(made: Any) -> None:
    model, batch = made["skips"]
    plans = compiler.frontier_training(model, (), batch, goal=goal(), points=4)
    peaks = [plan.predicted.peak_bytes for plan in plans]
    assert 2 <= len(plans) <= 4 and peaks == sorted(peaks)
    assert [p.predicted.seconds for p in plans] == sorted((p.predicted.seconds for p in plans), reverse=True)
    assert all(plan.goal.memory == plan.predicted.peak_bytes for plan in plans)
    redone = optimize_training(model, (), batch, goal=plans[0].goal, plan=plans[0])
    assert redone.plan.met
