"""What a stage's step costs: of several graphs the expected seconds and the largest peak, with what stands
beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes
from effcompile.estimate.optimizer import state_bytes
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target
from effcompile.ops.optimizers import StatesForm
from effcompile.passes.training.states import SITE
from effcompile.report.runs import RunMachine
from effcompile.runs.entering import Entered
from effcompile.runs.fields.base import Graph


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A stage's plans, one for each of its graphs; the first has the optimizer.

    Attributes:
        beside: bytes that the stage's fields keep on the device. states: of the optimizer, beside the graphs
            after the first.
        flops: of a step's forward and backward, expected; None where they could not be counted. parameters:
            of the model.
    """

    plans: tuple[Plan, ...]
    graphs: tuple[Graph, ...]
    beside: int = 0
    states: int = 0
    flops: float | None = None
    parameters: int = 0

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @property
    def seconds(self) -> float:
        """Expected of a step.

        Graphs after the first have no update in their plans: that of the first is added.
        """
        update = next(
            (decision.cost.seconds for decision in self.plan.decisions if decision.site == SITE), 0.0
        )
        steps = [plan.predicted.seconds or 0.0 for plan in self.plans]
        return sum(
            graph.share * (step + update * (place > 0))
            for place, (graph, step) in enumerate(zip(self.graphs, steps, strict=True))
        )

    @property
    def peak(self) -> int | None:
        """At the highest instant of any step."""
        others = [(plan.peak_bytes or 0) + self.states for plan in self.plans[1:]]
        return None if self.plan.peak_bytes is None else max(self.plan.peak_bytes, *others, 0) + self.beside


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """`memory`: of the plan of each graph; None for no limit. `beside`, `states`: see `Priced`."""

    memory: tuple[int | str | None, ...]
    beside: int
    states: int


def limits(entered: Entered, memory: int | str | None, target: str | Target) -> Budgets:
    """What each of a stage's graphs may take.

    Raises:
        UsageError: what the stage's fields keep leaves nothing.
    """
    beside, graphs = entered.bytes_beside, entered.graphs
    device = next(iter(entered.model.parameters())).device.type
    parameters = [(group, p) for group in entered.optimizer.param_groups for p in group["params"]]
    states = (
        state_bytes(StatesForm(), entered.optimizer, parameters, device).state_bytes if len(graphs) > 1 else 0
    )
    if memory is None:
        return Budgets(memory=(None,) * len(graphs), beside=beside, states=states)
    limit = Goal.of(mode="training", memory=memory).memory
    assert limit is not None
    left = limit - beside
    if left <= states:
        raise UsageError(
            f"Stage {entered.number + 1} keeps {format_bytes(beside + states)} beside its step, of "
            f"{format_bytes(limit)}: nothing is left."
        )
    return Budgets(memory=(left, *[left - states] * (len(graphs) - 1)), beside=beside, states=states)


def machine_of(target: str | Target) -> RunMachine:
    """What a target takes by the hour, where it states that."""
    found = None if target == "auto" else target if isinstance(target, Target) else load_target(target)
    return RunMachine() if found is None else RunMachine(watts=found.watts, price=found.hourly_price)
