"""What the commands `optimize`, `plan` and `frontier` have in common: the job that they make of their options.

torch takes seconds to import: it is, with the user's model, when the job is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from effcompile import console, report
from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.planner.batch import wanted_sizes
from effcompile.planner.learning_rate import LearningRate

if TYPE_CHECKING:
    from effcompile.compiler import Executable, Request, TrainingExecutable
    from effcompile.loader import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The user's model, and what is asked of it."""

    loaded: Loaded
    request: Request

    def carried_out(self) -> Executable | TrainingExecutable:
        """Planned, lowered, verified and measured."""
        from effcompile.deferred import carry_out

        return carry_out(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs)

    def planned(self) -> Plan:
        """Decided; nothing is lowered."""
        from effcompile.deferred import make_plan

        return make_plan(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs)

    def frontier(self, points: int | None) -> list[Plan]:
        """Plans along the memory-time front."""
        from effcompile.deferred import make_frontier

        return make_frontier(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs, points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `optimize`, `plan` and `frontier` have in common. `changes` are the goal fields given on the command line."""

    file: str
    changes: Mapping[str, object]
    target: str
    backend: str | None
    passes: list[str] | None
    dynamic: bool | None
    keep_outputs: bool
    batch: str | None = None
    lr: str | None = None

    def checked(self) -> Job:
        """The job without the goal fields that were not given, all checked that can be before torch and the model load.

        Raises:
            UsageError: a goal or target that does not exist or is not allowed.
        """
        changes = {name: value for name, value in self.changes.items() if value is not None}
        Goal.of(**changes)
        if self.batch is not None:
            wanted_sizes(self.batch)
        if self.lr is not None:
            parsed_rate(self.lr)
        if self.target != "auto":
            from effcompile.machine.machines import load_target

            load_target(self.target)
        return replace(self, changes=changes)

    def load(self, steps: report.Steps, plan: Plan | None = None) -> Wanted:
        """The user's model, and what is asked of it: a saved plan's goal, or that of the file changed by the command line."""
        with steps.step("load the model"):
            from effcompile.api import declare, goal_of_plan, to_training_mode
            from effcompile.compiler import Request
            from effcompile.loader import load
            from effcompile.passes import load_passes, load_training_passes

            loaded = load(self.file)
        asked = declare(loaded.goal, self.changes) if plan is None else goal_of_plan(plan, None, self.changes, self.backend)
        training = asked.mode == "training"
        (load_training_passes if training else load_passes)(self.passes)
        if training:
            console.warn(to_training_mode(loaded.model))
        request = Request(
            goal=asked,
            target=self.target,
            backend=self.backend,
            plan=plan,
            passes=self.passes,
            dynamic=self.dynamic,
            calibration=loaded.calibration or None if not training else None,
            loss=loaded.loss if training else None,
            keep_outputs=self.keep_outputs,
            optimizer=loaded.optimizer if training else None,
            batch=self.batch,
            lr=None if self.lr is None else parsed_rate(self.lr),
            progress=steps,
        )
        return Wanted(loaded=loaded, request=request)


def parsed_rate(said: str) -> tuple[float, int]:
    """Return "3e-4@256" as a learning rate and its batch.

    Raises:
        UsageError: it is none.
    """
    rate, _, batch = said.partition("@")
    try:
        given = (float(rate), int(batch))
    except ValueError:
        raise UsageError(f"--lr {said}: give a learning rate and the batch that it is good for, as 3e-4@256.") from None
    LearningRate.of(given)
    return given
