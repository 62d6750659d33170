"""A budget that was named as feasible can be planned: when prices are taken anew, and when running takes more
than was simulated.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.capture import capture_training
from effcompile.compiler import optimize_training
from effcompile.compiler.training import attempt
from effcompile.core.errors import InfeasibleError, InputsError
from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.estimate.operators import Measured
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target
from effcompile.passes.training.checkpoint import Checkpoint, keeping_all
from effcompile.planner.remat import BlockFront
from effcompile.proof.training import verify
from effcompile.proof.training.original import Original
from effcompile.schedules.blocks import Block
from effcompile.search.training import operator_costs
from effcompile.search.training.operator_costs import OperatorCosts

#: Steps that keep everything do not fit where recomputing does: activations are most of it.
PASSES = ["checkpoint"]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(torch.tanh(x)).sigmoid()
        return x.square().mean()


def planned(model: nn.Module, memory: int) -> Any:
    inputs = {"x": torch.linspace(-1, 1, 64 * 16).reshape(64, 16)}
    return optimize_training(model, (), inputs, goal=Goal(mode="training", memory=memory), passes=PASSES)


def least(model: nn.Module) -> int:
    with pytest.raises(InfeasibleError) as refused:
        planned(model, 1)
    return refused.value.needed


def test_prices_taken_anew_do_not_take_the_named_budget_back(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the step was run within it, blocks whose search ends early at other prices are no reason that it
    is not feasible.
    """
    model = Deep()
    named = least(model)

    def early(self: Checkpoint, block: Block) -> BlockFront:
        return BlockFront(
            options=(keeping_all(block),), found=1, complete=False, proven=False, solver="", seconds=0.0
        )

    prepare = attempt.Attempt._prepare

    def prepared(self: attempt.Attempt, *args: Any) -> None:
        monkeypatch.setattr(Checkpoint, "front", early)
        self.work.fronts.clear()
        prepare(self, *args)

    monkeypatch.setattr(attempt.Attempt, "_prepare", prepared)
    monkeypatch.setattr(Plan, "misjudged", property(lambda self: 0.1))
    monkeypatch.setattr(attempt, "busy", lambda: "")
    plan = planned(model, named).plan
    assert Checkpoint.front is early, "prices were not taken anew"
    assert plan.over_memory is None
    assert (plan.measured.peak_bytes or 0) <= named


def test_the_models_own_step_is_run_once_for_all_plans_of_a_request(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    run, own = verify.run, Original.run

    def original(self: Any, *args: Any) -> Any:
        ran.append("the original")
        return own(self, *args)

    def each(*args: Any) -> Any:
        ran.append("a step")
        return run(*args)

    monkeypatch.setattr(Original, "run", original)
    monkeypatch.setattr(verify, "run", each)
    monkeypatch.setattr(Plan, "misjudged", property(lambda self: 0.1))
    monkeypatch.setattr(attempt, "busy", lambda: "")
    made = planned(Deep(), 1 << 20)
    assert ran == ["a step", "the original", "a step", "a step"], "of two plans, beside one original"
    ran.clear()
    monkeypatch.setattr(attempt, "busy", lambda: "others compile")
    planned(Deep(), 1 << 20)
    assert ran.count("a step") < 3, "prices of a busy minute are not taken"
    assert made.plan.checks and all(check.passed for check in made.plan.checks)


def test_an_operator_that_is_timed_again_keeps_its_bytes() -> None:
    """A step that is cut meanwhile, or a kernel whose bytes are seen once in a while, is not simulated with
    fewer than were seen.
    """
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(8)
    node = graph.call_function(torch.ops.aten.mul.Scalar, (x, 2.0))
    node.meta["val"] = torch.zeros(8)
    figures = OperatorCosts(target=load_target("cpu-generic"), here=True)
    figures.known[operators.key(node)] = Measured(seconds=600.0, workspace=4096)
    figures.doubt([node])
    assert figures.workspace(node, 0) == 4096
    figures.measure([node])
    assert figures.workspace(node, 0) == 4096
    assert figures.seconds(node) < 600


def test_an_operator_timed_on_a_busy_machine_is_timed_again_once_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(8)
    node = graph.call_function(torch.ops.aten.mul.Scalar, (x, 2.0))
    node.meta["val"] = torch.zeros(8)
    name = operators.key(node)
    figures = OperatorCosts(target=load_target("cpu-generic"), here=True)

    def kept(others: str, seconds: float) -> operators.Measured:
        """What is known after another plan, made while others use the machine or not."""
        monkeypatch.setattr(operator_costs, "busy", lambda: others)
        figures.known[name] = replace(
            figures.known.get(name, Measured(seconds=0, workspace=0)), seconds=seconds
        )
        figures.doubt_busy()
        figures.measure([node])
        return figures.known[name]

    monkeypatch.setattr(operator_costs, "busy", lambda: "load 9")
    figures.measure([node])
    assert figures.known[name].busy
    assert kept("load 9", 600.0).seconds == 600, "as good as new while the machine is still busy"
    idle = kept("", 600.0)
    assert idle.seconds < 600 and not idle.busy
    assert kept("", 600.0).seconds == 600, "timed once where nobody interferes"
    known = {name: Measured(seconds=600.0, workspace=0, busy=True)}
    assert OperatorCosts(target=load_target("cpu-generic"), here=True, known=known).doubted == {name}


def test_operators_timed_within_another_step_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the caches hold leaves its operands there; a large one does not."""
    step = capture_training(Deep(), (), {"x": torch.ones(64, 16)})
    figures = OperatorCosts(target=load_target("cpu-generic"), here=True)
    figures.within(step)
    assert figures.cold == 0 and not figures.doubted
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    figures.measure(nodes)
    assert {found.cold for found in figures.known.values()} == {0}
    monkeypatch.setattr(operator_costs, "pushed_out", lambda nbytes: 4096)
    figures.within(step)
    figures.measure(nodes)
    assert figures.cold == 4096 and {found.cold for found in figures.known.values()} == {4096}


def test_what_running_took_beside_is_part_of_the_budget_that_is_named_then(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's kernel may take more than it took at made-up values: the next budget that is named has
    it.
    """
    model, beside = Deep(), 4096
    named, verified = least(model), attempt.verified

    def with_more(*args: Any) -> Any:
        return verified(*args)._replace(over=max(0, named + beside - args[3].goal.memory))

    monkeypatch.setattr(attempt, "verified", with_more)
    with pytest.raises(InfeasibleError) as refused:
        planned(model, named)
    assert refused.value.needed == named + beside
    assert "No plan is within" in str(refused.value) and "4 KiB more" in str(refused.value)
    monkeypatch.undo()
    assert planned(model, named + beside).plan.over_memory is None


class Strict(Deep):
    """Reads a row that large weights take out of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = (self.layers[0].weight.detach().norm() / 10).long().reshape(1)
        return super().forward(x + x.index_select(0, row))


def test_a_model_that_raises_behind_an_update_is_told_as_it_is(quick_training: Path) -> None:
    model = Strict()
    goal = Goal(mode="training", memory=1 << 20)
    sgd = torch.optim.SGD(model.parameters(), lr=1e9)
    inputs = {"x": torch.linspace(-1, 1, 64 * 16).reshape(64, 16)}
    with pytest.raises(InputsError, match=r"itself raises behind an update by the given optimizer.*out of"):
        optimize_training(model, (), inputs, goal=goal, passes=PASSES, optimizer=sgd)
