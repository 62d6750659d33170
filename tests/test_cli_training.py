"""Training on the command line, with a compiler that hands out a made plan: what reaches it, what is printed,
written, refused.
"""

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import Outcome

from effcompile import compiler
from effcompile.core.causes import Said
from effcompile.core.cost import Cost
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Unsupported
from effcompile.core.units import parse_bytes
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.ir.step_figures import MemoryTimeline

MIB = 2**20
TRAIN = """
import torch
model = torch.nn.Linear(4, 1).train()
inputs = (torch.randn(2, 4),)
def loss(outputs, inputs):
    return outputs.square().mean()
"""


def training_plan(goal: Goal, seconds: float = 1.1) -> Plan:
    keep = Cost(bytes_kept=60 * MIB)
    decision = Decision(
        site="transformer.h.0",
        kind="checkpoint",
        option="recompute gelu",
        baseline="keep everything",
        by="checkpoint",
        cost=Cost(seconds=0.1, bytes_kept=20 * MIB),
        baseline_cost=keep,
        settings={"keep": ("x",), "remade_from": ""},
    )
    line = MemoryTimeline(
        points=(100 * MIB, 800 * MIB, 300 * MIB),
        forward_points=1,
        parameter_bytes=90 * MIB,
        peak_phase="backward",
        peak_site="lm_head",
        peak_node="mm",
        parts={"gradients": 10 * MIB},
    )
    return Plan(
        model="Linear",
        fingerprint="c0ffee",
        parameters=5,
        goal=goal,
        target="auto",
        target_line="2 cores",
        backend="torch",
        decisions=(decision, replace(decision, site="transformer.h.1")),
        declined=(
            Declined(
                site="transformer.h.0",
                kind="checkpoint",
                option="keep everything",
                by="checkpoint",
                reason=Unsupported("above the budget"),
                cost=keep,
            ),
        ),
        certificate=Certificate(
            status="optimal within gap",
            objective=1.1,
            bound=1.1,
            gap=0.01,
            sites=2,
            alternatives=4,
            seconds=0.1,
            solver="z3",
        ),
        baseline=Totals(seconds=1.0, peak_bytes=1900 * MIB, error=0.0),
        predicted=Totals(seconds=seconds, peak_bytes=800 * MIB, error=0.0),
        memory_timeline=line,
    )


class Planned:
    """What a fake `optimize_training` returns."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def save(self, directory: Path) -> Path:
        self.plan.save(Path(directory) / "plan.json")
        return Path(directory)


@dataclass
class Compiler:
    """Records what reaches the compiler's training entries."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def optimize_training(self, model: Any, args: Any, kwargs: Any, **request: Any) -> Planned:
        self.calls.append({"model": model, "args": args, "kwargs": kwargs, **request})
        made = training_plan(request["goal"])
        return Planned(made.with_changes(measured=Totals(seconds=1.2, peak_bytes=801 * MIB, error=0.0)))

    def plan_training(self, model: Any, args: Any, kwargs: Any, **request: Any) -> Plan:
        self.calls.append({"model": model, **request})
        return training_plan(request["goal"])

    def frontier_training(self, model: Any, args: Any, kwargs: Any, **request: Any) -> list[Plan]:
        self.calls.append({"model": model, **request})
        return [
            training_plan(replace(request["goal"], memory=m), s)
            for m, s in ((850 * MIB, 1.4), (950 * MIB, 1.1))
        ]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    for name, ours in {
        "optimize_training": "optimize_training",
        "plan_parts": "plan_training",
        "frontier_training": "frontier_training",
    }.items():
        monkeypatch.setattr(compiler, name, getattr(made, ours))
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to_file(text: str = TRAIN) -> Path:
        path = tmp_path / "model.py"
        path.write_text(textwrap.dedent(text))
        return path

    return to_file


def test_optimize_asks_for_the_step_and_writes_plan_and_report_only(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    outcome = Outcome(
        capsys, "optimize", write(), "--mode", "training", "--memory", "900MiB", "--keep-outputs", "-o", out
    )
    assert outcome.status == 0, outcome.err
    call = fake.calls[0]
    assert call["goal"] == Goal(mode="training", memory=parse_bytes("900MiB"))
    assert call["keep_outputs"] is True
    assert call["loss"].__name__ == "loss"
    assert call["model"].training
    assert "✔ met" in outcome.out
    assert "memory over the step" in outcome.out
    assert sorted(p.name for p in out.iterdir()) == ["plan.json", "report.html"]
    assert Plan.load(out / "plan.json").decisions[0].settings == {"keep": ("x",), "remade_from": ""}
    assert "<svg" in (out / "report.html").read_text()


def test_json_is_one_document(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path], tmp_path: Path
) -> None:
    outcome = Outcome(capsys, "optimize", write(), "--mode", "training", "--json", "-o", tmp_path / "out")
    data = json.loads(outcome.out)
    assert data["met"] is True
    assert [Path(path).name for path in data["written"]] == ["plan.json", "report.html"]
    assert data["memory_timeline"]["peak_site"] == "lm_head"


def test_a_peak_over_the_budget_exits_1(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path]
) -> None:
    # 801 MiB measured
    outcome = Outcome(capsys, "optimize", write(), "--mode", "training", "--memory", "800MiB")
    assert outcome.status == 1
    assert "✘ not met" in outcome.out


def test_the_file_may_declare_the_goal(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path]
) -> None:
    path = write(TRAIN + "goal = {'mode': 'training', 'memory': '900MiB'}\n")
    assert Outcome(capsys, "plan", path).status == 0
    assert Outcome(capsys, "plan", path, "--memory", "1GiB").status == 0
    assert [call["goal"].memory for call in fake.calls] == [900 * MIB, 2**30]
    assert fake.calls[0]["goal"].mode == "training"


def test_a_saved_plan_is_applied(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path], tmp_path: Path
) -> None:
    saved = training_plan(Goal(mode="training", memory=900 * MIB)).save(tmp_path / "plan.json")
    outcome = Outcome(capsys, "optimize", write(), "--plan", saved)
    assert outcome.status == 0, outcome.err
    assert fake.calls[0]["plan"] == Plan.load(saved)
    assert Outcome(capsys, "optimize", write(), "--plan", saved, "--memory", "1GiB").status == 2


def test_a_model_in_eval_mode_is_put_in_training_mode_and_said_so(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path]
) -> None:
    outcome = Outcome(capsys, "plan", write(TRAIN.replace(".train()", ".eval()")), "--mode", "training")
    assert outcome.status == 0
    assert fake.calls[0]["model"].training
    assert "Linear was in eval mode" in outcome.words
    assert "eval mode" not in Outcome(capsys, "plan", write(), "--mode", "training").words


def test_an_optimizer_made_in_the_file_is_taken_as_it_is(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path]
) -> None:
    text = TRAIN + "optimizer = torch.optim.SGD(model.parameters())\n"
    assert Outcome(capsys, "plan", write(text), "--mode", "training").status == 0
    assert isinstance(fake.calls[0]["optimizer"], torch.optim.SGD)


def test_an_optimizer_in_the_file_is_planned_too(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path]
) -> None:
    text = TRAIN + "def optimizer(parameters):\n    return torch.optim.SGD(parameters)\n"
    assert Outcome(capsys, "plan", write(text), "--mode", "training").status == 0
    assert isinstance(fake.calls[0]["optimizer"]([torch.nn.Parameter(torch.ones(2))]), torch.optim.SGD)


def test_frontier_plots_and_writes_the_picture(
    capsys: pytest.CaptureFixture[str], fake: Compiler, write: Callable[..., Path], tmp_path: Path
) -> None:
    outcome = Outcome(
        capsys, "frontier", write(), "--mode", "training", "--points", "5", "-o", tmp_path / "out"
    )
    assert outcome.status == 0, outcome.err
    assert fake.calls[0]["points"] == 5
    assert "●" in outcome.out
    assert "850.0 MiB" in outcome.out
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]
    assert (tmp_path / "out" / "report.html").read_text().count("<circle") == 2
    Outcome(capsys, "frontier", write(), "--mode", "training")
    assert "points" not in fake.calls[1], "the compiler knows how many are usual"


def test_explain_of_a_module_in_a_block(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = training_plan(Goal(mode="training")).save(tmp_path / "plan.json")
    outcome = Outcome(capsys, "explain", saved, "transformer.h.0.mlp")
    assert outcome.status == 0
    assert "recompute gelu" in outcome.out
    assert "above the budget" in outcome.out
    data = json.loads(Outcome(capsys, "explain", saved, "transformer.h.0.mlp", "--json").out)
    assert [d["option"] for d in data["declined"]] == ["keep everything"]


def test_run_says_that_there_is_no_artifact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    training_plan(Goal(mode="training")).save(tmp_path / "plan.json")
    outcome = Outcome(capsys, "run", tmp_path)
    assert outcome.status == 2
    assert "no artifact to run" in outcome.words
    assert f"effcompile.optimize(model, plan='{tmp_path / 'plan.json'}')" in outcome.err


def test_infeasible_gives_the_command_that_would_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InfeasibleError(
            Said("the loss head alone needs 618 MiB"), binding=("memory",), nearest={"memory": 700 * MIB}
        )

    monkeypatch.setattr(compiler, "optimize_training", refuse)
    out = tmp_path / "out"
    outcome = Outcome(capsys, "optimize", write(), "--mode", "training", "--memory", "600MiB", "-o", out)
    assert outcome.status == 1
    assert f"optimize {tmp_path / 'model.py'} --mode training -o {out} --memory 0.69GiB" in outcome.words
    assert not out.exists(), "nothing half-made"
    data = json.loads(
        Outcome(capsys, "optimize", write(), "--mode", "training", "--memory", "600MiB", "--json").out
    )
    assert data["error"]["nearest"] == {"memory": 700 * MIB}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mode", "training", "--dynamic"), "one batch shape"),
        (("--keep-outputs",), "keep_outputs is for a training step"),
        (("--mode", "training", "--pass", "quantize"), "The pass 'quantize' is for the mode 'inference'"),
        (("--mode", "training", "--memory", "12 parsecs"), "'12 parsecs' is not a size"),
        (("--mode", "training", "--memory", "0"), "at least one byte"),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str],
    fake: Compiler,
    write: Callable[..., Path],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    outcome = Outcome(capsys, "optimize", write(), *arguments)
    assert outcome.status == 2
    assert says in outcome.words
    assert fake.calls == []


def test_errors_of_the_compiler_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("the forward returns no loss")

    monkeypatch.setattr(compiler, "optimize_training", refuse)
    outcome = Outcome(capsys, "optimize", write(), "--mode", "training")
    assert (outcome.status, "returns no loss" in outcome.words) == (2, True)
