"""A training pass of another package, found by its entry point: it competes in the solve, is verified, told,
saved and applied again.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from third_party_helpers import PACKAGE, declared, install
from torch import nn
from train_helpers import differing, eager, measured

from effcompile.compiler import optimize_training, plan_training
from effcompile.core.errors import FormatError, InfeasibleError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.ir.footprint import WORKING, Footprint
from effcompile.ir.plan import Plan
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
GROUP = "effcompile.training_passes"
EXACT = ["no-pointwise"]


class Scaled(nn.Module):
    """Layers whose results are multiplied by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * 1.0)
        return nn.functional.mse_loss(x, y)


@pytest.fixture
def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Scaled().train(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, as its pyproject.toml declares it."""
    install(tmp_path, GROUP, declared(GROUP))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield
    sys.modules.pop("effcompile_unscale", None)


def plan_of(made: Any, passes: list[str] = EXACT, **goal: Any) -> Plan:
    model, batch = made
    return plan_training(
        model, (), batch, goal=Goal(mode="training", **goal), target="cpu-generic", passes=passes
    )


def product(plan: Plan) -> str:
    return next((d.option for d in plan.decisions if d.kind == "products with one"), "")


@pytest.mark.usefixtures("installed")
def test_it_competes_in_the_solve_and_what_was_not_taken_is_told(made: Any) -> None:
    plan = plan_of(made)
    decision = next(d for d in plan.decisions if d.by == "unscale")
    assert (decision.site, decision.option, decision.baseline) == ("step", "left out", "kept")
    assert decision.cost.seconds < decision.baseline_cost.seconds and decision.settings == {"count": 6}
    assert [d.option for d in plan.declined if d.by == "unscale"] == ["kept"]
    assert "more a step" in next(words(d.reason) for d in plan.declined if d.by == "unscale")
    without = plan_of(made, [*EXACT, "no-unscale"])
    assert product(without) == "" and plan.predicted.seconds < without.predicted.seconds
    few = plan_of(made, [*EXACT, "unscale.least=9"])
    assert [words(d.reason) for d in few.declined if d.by == "unscale"] == ["there are 6"]


@pytest.mark.usefixtures("installed")
def test_bytes_and_seconds_that_it_puts_beside_the_step_count(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import effcompile_unscale as unscale

    plain, real = plan_of(made), unscale.Unscale.apply

    def heavier(self: Any, case: Any, choice: Any, option: Any) -> Any:
        beside = case.beside + Footprint(resident={WORKING: 10_000_000})
        note = Because("a table lies beside the step")
        return replace(real(self, case, choice, option), beside=beside, seconds_beside=1e-7, notes=(note,))

    monkeypatch.setattr(unscale.Unscale, "apply", heavier)
    plan = plan_of(made)
    assert product(plan) == "left out" and Because("a table lies beside the step") in plan.notes
    assert (
        plan.predicted.peak_bytes
        == plain.predicted.peak_bytes + 10_000_000
        == plan.memory_timeline.peak_bytes
    )
    assert plan.predicted.seconds == pytest.approx(plain.predicted.seconds + 1e-7)
    without = plan_of(made, memory=10_000_000)
    assert product(without) == ""
    assert any("needs at least" in words(d.reason) for d in without.declined if d.option == "left out")


@pytest.mark.usefixtures("installed")
def test_it_is_a_row_of_the_lever_table(made: Any) -> None:
    model, _ = made
    large = model, {"x": torch.randn(256, 16), "y": torch.randn(256, 16)}
    with pytest.raises(InfeasibleError) as refused:
        plan_of(large, memory=1000)
    tight = plan_of(large, memory=(refused.value.needed + (plan_of(large).baseline.peak_bytes or 0)) // 2)
    assert ("products with one",) in {row.levers for row in tight.levers}


@pytest.mark.usefixtures("installed")
def test_the_step_is_run_verified_saved_and_applied_again(made: Any, tmp_path: Path) -> None:
    model, batch = made
    executable = optimize_training(
        model, (), batch, goal=Goal(mode="training"), passes=[*EXACT, "unscale", "checkpoint"]
    )
    assert product(executable.plan) == "left out" and executable.plan.met
    assert differing(measured(lambda: executable(**batch), model, 0)[0], eager(model, batch)) == []
    plan = Plan.load(executable.plan.save(tmp_path / "plan.json"))
    again = optimize_training(model, (), batch, goal=plan.goal, plan=plan)
    assert again.plan.met and again.plan.measured.peak_bytes == executable.plan.measured.peak_bytes
    assert len(again.runner.step.graph.nodes) == len(executable.runner.step.graph.nodes)
    with pytest.raises(
        FormatError, match=r"products with one = left out at step, which no pass here proposes.*Install it"
    ):
        optimize_training(model, (), batch, goal=plan.goal, plan=plan, passes=["no-unscale"])


def test_without_the_package_its_name_is_unknown(made: Any) -> None:
    with pytest.raises(UnknownNameError, match="unscale"):
        plan_of(made, ["unscale"])


def raises(unscale: Any, step: Any, context: Any) -> Any:
    raise RuntimeError("broken")


def twice(unscale: Any, step: Any, context: Any) -> Any:
    option = unscale.StepOption(name="kept")
    return [unscale.StepChoice(site="step", kind="x", baseline="kept", options=(option, option))]


def no_baseline(unscale: Any, step: Any, context: Any) -> Any:
    return [
        unscale.StepChoice(
            site="step", kind="x", baseline="kept", options=(unscale.StepOption(name="other"),)
        )
    ]


def strange(unscale: Any, step: Any, context: Any) -> Any:
    return ["nonsense"]


def option(unscale: Any, kind: str = "x", **fields: Any) -> Any:
    options = (unscale.StepOption(name="kept"), unscale.StepOption(name="other", **fields))
    return unscale.StepChoice(site="no.such.layer", kind=kind, baseline="kept", options=options)


def said_in_a_sentence(unscale: Any, step: Any, context: Any) -> Any:
    return [option(unscale, why="it is faster")]


def set_to_what_no_plan_keeps(unscale: Any, step: Any, context: Any) -> Any:
    return [option(unscale, settings={"share": 0.5})]


def the_same_in_reserve(unscale: Any, step: Any, context: Any) -> Any:
    (choice,) = set_to_what_no_plan_keeps(unscale, step, context)
    *others, strange = choice.options
    return [replace(choice, options=tuple(others), reserve=(strange,))]


def one_kind_twice(unscale: Any, step: Any, context: Any) -> Any:
    return [option(unscale), option(unscale)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("proposes", "said"),
    [
        (raises, "RuntimeError: broken"),
        (twice, "have one name"),
        (no_baseline, "not among its options"),
        (strange, "'nonsense'"),
        (said_in_a_sentence, "Give one of effcompile.core.reasons"),
        (set_to_what_no_plan_keeps, "0.5 is no setting"),
        (the_same_in_reserve, "0.5 is no setting"),
        (one_kind_twice, "it decides about 'x', which is decided already"),
    ],
)
def test_one_that_proposes_nonsense_is_declined_by_name(
    made: Any, monkeypatch: pytest.MonkeyPatch, proposes: Callable[..., Any], said: str
) -> None:
    import effcompile_unscale as unscale

    monkeypatch.setattr(
        unscale.Unscale, "propose", lambda self, step, context: proposes(unscale, step, context)
    )
    plan = plan_of(made)
    (declined,) = [d for d in plan.declined if d.by == "unscale"]
    assert said in words(declined.reason) and plan.predicted.seconds


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"seconds_beside": -1.0}, "seconds_beside = -1.0 is negative"),
        ({"seconds_beside": float("nan")}, "seconds_beside = nan is not a number"),
        ({"repeats": float("inf")}, "repeats = inf is not a number"),
        (
            {"beside": Footprint(resident={WORKING: -(1 << 30)})},
            "beside.resident.working memory = -1073741824 is negative",
        ),
        ({"beside": "nothing"}, "which is no Case with a Footprint beside it"),
    ],
)
def test_one_whose_figures_cannot_be_is_declined_before_they_are_solved_with(
    made: Any, monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any], said: str
) -> None:
    import effcompile_unscale as unscale

    real = unscale.Unscale.apply
    changed = lambda self, case, choice, option: replace(real(self, case, choice, option), **beside)  # noqa: E731
    monkeypatch.setattr(unscale.Unscale, "apply", changed)
    plan = plan_of(made)
    (declined,) = [d for d in plan.declined if d.by == "unscale"]
    assert said in words(declined.reason) and product(plan) == ""


@pytest.mark.usefixtures("installed")
def test_one_whose_step_returns_something_else_is_declined(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import effcompile_unscale as unscale

    real = unscale.Unscale.apply

    def cut(self: Any, case: Any, choice: Any, option: Any) -> Any:
        changed = real(self, case, choice, option)
        changed.step.graph.output_node().args = (changed.step.results[:1],)
        return changed

    monkeypatch.setattr(unscale.Unscale, "apply", cut)
    assert any("has other results" in words(d.reason) for d in plan_of(made).declined if d.by == "unscale")


@pytest.mark.usefixtures("installed")
def test_one_that_changes_numbers_takes_part_only_where_an_error_is_allowed(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import effcompile_unscale as unscale

    monkeypatch.setattr(unscale.Unscale, "exact", False)
    exact = plan_of(made)
    assert product(exact) == "" and any("unscale is not proposed" in str(note) for note in exact.notes)
    assert product(plan_of(made, ["no-precision", *EXACT], max_error=0.01)) == "left out"


def test_a_name_that_is_taken_is_refused(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, GROUP, {"checkpoint": "effcompile_unscale:Unscale"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        UsageError, match=r"'checkpoint' of effcompile_unscale:Unscale has a name that is taken"
    ):
        plan_of(made)
