"""A lever over values of another package, found by its entry point: it competes in the solve, is verified,
told, saved, applied again.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from third_party_helpers import PACKAGE, declared, install
from torch import nn

from effcompile.compiler import optimize_training, plan_training
from effcompile.core.errors import FormatError, InfeasibleError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Decision, Plan
from effcompile.passes import ways
from effcompile.passes.training.levers import Rates
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
GROUP = "effcompile.value_levers"
ERROR = 0.05
PASSES = ["no-pointwise", "no-precision", "checkpoint.groups=false"]


class Tower(nn.Module):
    """Products and activations: what they keep is floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


Made = tuple[nn.Module, dict[str, torch.Tensor]]


@pytest.fixture
def made() -> Made:
    torch.manual_seed(0)
    return Tower().train(), {"x": torch.randn(128, 64), "y": torch.randn(128, 64)}


@pytest.fixture
def lever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The lever's class, its package installed as its pyproject.toml declares it."""
    install(tmp_path, GROUP, declared(GROUP))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    import effcompile_half

    return effcompile_half.Half


def plan_of(made: Made, *passes: str, error: float = ERROR, memory: int | None = None) -> Plan:
    model, batch = made
    goal = Goal(mode="training", max_error=error, memory=memory)
    return plan_training(model, (), batch, goal=goal, target="cpu-generic", passes=[*PASSES, *passes])


def tight(made: Made) -> int:
    """A budget between the least that is feasible without the lever and what keeping everything takes."""
    with pytest.raises(InfeasibleError) as refused:
        plan_of(made, "no-half", memory=1000)
    return (refused.value.needed + (plan_of(made, "no-half").baseline.peak_bytes or 0)) // 2


def held(plan: Plan) -> list[Decision]:
    return [d for d in plan.decisions if d.by == "half"]


def test_it_competes_in_the_solve_and_less_memory_is_enough(made: Made, lever: Any) -> None:
    assert list(ways()) == [
        "offload",
        "compress",
        "compress+offload",
        "compress4",
        "compress4+offload",
        "compress2",
        "compress2+offload",
        "bitmask",
        "bitmask+offload",
        "half",
        "half+offload",
    ]
    assert held(plan_of(made)) == []  # nothing binds
    plan, without = plan_of(made, memory=(budget := tight(made))), plan_of(made, "no-half", memory=budget)
    # products are dearer to run again
    assert (plan.predicted.seconds or 0.0) < (without.predicted.seconds or 0.0)
    assert held(plan) and all(
        d.kind == "half" and d.cost.bytes_kept * 2 == d.baseline_cost.bytes_kept for d in held(plan)
    )
    assert plan.predicted.peak_bytes is not None and plan.predicted.peak_bytes <= budget
    assert ("half",) in {row.levers for row in plan.levers} and plan.levers[-1].levers == (
        "recompute",
        "half",
    )
    assert "in 16 bits between forward and backward" in words(held(plan)[0].why)


def test_it_is_run_verified_saved_and_applied_again(
    made: Made, lever: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whatever products cost on this machine: where they are fast, they would be run again
    monkeypatch.setattr(lever, "rates", lambda *_: Rates(pack={"half": 1e-12}))
    model, batch = made
    goal = Goal(mode="training", max_error=ERROR, memory=tight(made))
    executable = optimize_training(model, (), batch, goal=goal, passes=PASSES)
    plan = executable.plan
    assert (
        held(plan)
        and plan.met
        and plan.measured is not None
        and plan.measured.peak_bytes == plan.predicted.peak_bytes
    )
    assert plan.checks[0].name == "loss and whole gradient, as eager" and 0 < plan.checks[0].error <= ERROR
    saved = Plan.load(plan.save(tmp_path / "plan.json"))
    again = optimize_training(model, (), batch, goal=saved.goal, plan=saved)
    assert again.plan.met and again.plan.measured.peak_bytes == plan.measured.peak_bytes
    sys.path.remove(str(tmp_path))
    with pytest.raises(FormatError, match=r"half = .* which no pass here proposes.*Install it"):
        optimize_training(model, (), batch, goal=saved.goal, plan=saved)


def test_its_error_is_measured_and_one_that_is_too_coarse_is_not_taken(made: Made, lever: Any) -> None:
    model, batch = made
    goal = Goal(mode="training", max_error=1e-4, memory=tight(made))
    plan = optimize_training(model, (), batch, goal=goal, passes=PASSES).plan
    assert held(plan) == [] and plan.met
    taken = optimize_training(
        model, (), batch, goal=Goal(mode="training", max_error=1e-4), passes=PASSES
    ).plan
    assert held(taken) == [] and taken.met
    exact = plan_of(made, error=0.0)
    assert held(exact) == [] and any("half is not proposed" in str(note) for note in exact.notes)


def test_without_the_package_its_name_is_unknown(made: Made) -> None:
    with pytest.raises(UnknownNameError, match="half"):
        plan_of(made, "half")


def raises(*_: object) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("member", "answer", "said"),
    [
        ("takes", raises, "RuntimeError: broken"),
        ("rates", raises, "RuntimeError: broken"),
        ("rates", lambda *_: Rates(pack={"half": -1.0}), "takes -1.0 seconds"),
        ("rates", lambda *_: Rates(pack={"half": float("nan")}), "takes nan seconds"),
        ("rates", lambda *_: Rates(host_bytes=-5), "has -5 bytes of room"),
        ("rates", lambda *_: "nonsense", "'str' object has no attribute"),
        ("ways", property(raises), "RuntimeError: broken"),
        ("ways", property(lambda _: ("nonsense",)), "has the way 'nonsense', which is none that it knows"),
        ("share", float("nan"), "takes values of the share nan"),
        ("share", -1.0, "takes values of the share -1.0"),
    ],
)
def test_one_that_says_nonsense_is_declined_by_name(
    made: Made, lever: Any, monkeypatch: pytest.MonkeyPatch, member: str, answer: Any, said: str
) -> None:
    fake = type(
        "Half",
        (),
        {
            **vars(lever),
            member: answer,
            "__slots__": (),
            "__init__": lambda self: None,
            "__dataclass_fields__": {},
        },
    )
    fake.__dataclass_params__ = lever.__dataclass_params__  # type: ignore[attr-defined]
    if member != "share":
        fake.share = 0.02  # type: ignore[attr-defined]
    monkeypatch.setattr("effcompile_half.Half", fake)
    plan = plan_of(made, memory=tight(made))
    (declined,) = [d for d in plan.declined if d.by == "half"]
    assert (
        said in words(declined.reason)
        and declined.site == "values"
        and held(plan) == []
        and plan.predicted.seconds
    )


@pytest.mark.parametrize("size", [-4, 0.5, None, "raise"])
def test_a_codec_that_packs_to_nonsense_is_declined_by_name(
    made: Made, lever: Any, monkeypatch: pytest.MonkeyPatch, size: Any
) -> None:
    (way,) = lever.known
    wrong = raises if size == "raise" else lambda count: size
    way = replace(way, codec=replace(way.codec, packed_bytes=wrong))
    monkeypatch.setattr(lever, "known", (way,))
    plan = plan_of(made, memory=tight(made))
    (declined,) = [d for d in plan.declined if d.by == "half"]
    assert ("broken" if size == "raise" else f"to {size!r} bytes") in words(declined.reason) and held(
        plan
    ) == []


def another(way: Any, **changes: Any) -> tuple[Any, ...]:
    return (replace(way, **changes),)


@pytest.mark.parametrize(
    "known",
    [
        lambda way: "nonsense",
        lambda way: (1,),
        lambda way: (way, way),
        lambda way: another(way, by="offload"),
        lambda way: another(way, name="compress"),
    ],
)
def test_one_that_knows_no_ways_or_those_of_others_is_refused_by_name(
    made: Made, lever: Any, monkeypatch: pytest.MonkeyPatch, known: Any
) -> None:
    monkeypatch.setattr(lever, "known", known(*lever.known))
    with pytest.raises(UsageError, match=r"The lever 'half' must know a tuple of ways.*of a name of its own"):
        plan_of(made)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"compress": "effcompile_half:Half"}, "'compress' of effcompile_half:Half has a name that is taken"),
        ({"half": "effcompile_half:nothing"}, r"'half' \(effcompile_half:nothing\) cannot be imported"),
        (
            {"half": "effcompile_half:HALF"},
            r"'half' \(effcompile_half:HALF\) has no exact|has no known|has no share",
        ),
    ],
)
def test_a_bad_entry_point_is_refused_by_name(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], said: str
) -> None:
    install(tmp_path, GROUP, entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    with pytest.raises(UsageError, match=said):
        plan_of(made)
