"""What the commands `optimize`, `plan` and `frontier` have in common: the job that they make of their options.

torch takes seconds to import: it is, with the user's model, when the job is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effcompile import console, report
from effcompile.cli.strategy import parse_strategy
from effcompile.core.errors import UsageError, clipped
from effcompile.core.goal import Goal
from effcompile.core.names import check_backend, check_passes
from effcompile.ir.plan import Plan
from effcompile.loader.source import Reading, find
from effcompile.machine.cluster import parse_nodes

if TYPE_CHECKING:
    from effcompile.compiler import Executable, Request, TrainingExecutable
    from effcompile.loader.loaded import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """The options that say among which devices a step is divided, as they were typed."""

    devices: str | None
    nodes: str | None
    strategy: str | None
    global_batch: int | None
    batch_tokens: int | None

    def checked(self) -> Many:
        """The same, all checked that can be before torch loads.

        Raises:
            UsageError: a value that is not allowed, or one without --devices.
        """
        others = {"--strategy": self.strategy, "--global-batch": self.global_batch, "--batch-tokens": self.batch_tokens}
        if self.count is None and (given := [name for name, value in others.items() if value is not None]):
            raise UsageError(f"{given[0]} is for a step on many devices: give --devices or --nodes, too.")
        parse_strategy(self.strategy or "")
        return self

    @property
    def count(self) -> int | Literal["auto"] | None:
        """The number of devices, which --nodes gives as well; None: one device is planned for."""
        if self.devices is None:
            return None if self.nodes is None else math.prod(parse_nodes(self.nodes))
        if self.devices == "auto":
            return "auto"
        if not self.devices.isascii() or not self.devices.isdigit() or len(self.devices) > 9:
            raise UsageError(f"--devices {clipped(self.devices)} must be a number of devices, or auto.")
        return int(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The user's model, and what is asked of it."""

    loaded: Loaded
    request: Request

    def among(self, many: Many) -> Wanted:
        """The same on many devices, where that is asked."""
        from effcompile.compiler.parallel.asked import ManyDevices

        if many.count is None:
            return self
        devices = ManyDevices.of(
            many.count, nodes=many.nodes, strategy=parse_strategy(many.strategy or ""), global_batch=many.global_batch,
            batch_tokens=many.batch_tokens,
        )  # fmt: skip
        return replace(self, request=replace(self.request, devices=devices))

    def carried_out(self) -> Executable | TrainingExecutable:
        """Planned, lowered, verified and measured."""
        from effcompile.deferred import carry_out

        made = carry_out(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs)
        made.plan = self._noted(made.plan)
        return made

    def planned(self) -> Plan:
        """Decided; nothing is lowered."""
        from effcompile.deferred import make_plan

        return self._noted(make_plan(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs))

    def for_target(self, target: str) -> Wanted:
        """The same asked of another machine."""
        return replace(self, request=replace(self.request, target=target))

    def frontier(self, points: int | None) -> list[Plan]:
        """Plans along the memory-time front."""
        from effcompile.deferred import make_frontier

        return make_frontier(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs, points)

    def _noted(self, plan: Plan) -> Plan:
        """With what was done to the model or its inputs before it was planned."""
        return plan.with_changes(notes=(*plan.notes, *self.loaded.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `optimize`, `plan` and `frontier` have in common. `changes` are the goal fields given on the command line."""

    file: str
    reading: Reading
    changes: Mapping[str, object]
    target: str
    backend: str | None
    passes: list[str] | None
    dynamic: bool | None
    keep_outputs: bool
    batch: str | None = None
    lr: str | None = None

    @property
    def targets(self) -> list[str]:
        """The machines that are named: one, or several with commas between."""
        return [self.target] if Path(self.target).exists() else [name.strip() for name in self.target.split(",")]

    def checked(self) -> Job:
        """The job without the goal fields that were not given, all checked that can be before torch and the model load.

        Raises:
            UsageError: a goal, model, pass, backend or target that does not exist or is not allowed.
        """
        changes = {name: value for name, value in self.changes.items() if value is not None}
        Goal.of(**changes)
        if self.batch is not None:
            from effcompile.planner.batch import wanted_sizes

            wanted_sizes(self.batch)
        if self.lr is not None:
            parsed_rate(self.lr)
        check_passes(self.passes or ())
        check_backend(self.backend)
        for name in self.targets:
            if name != "auto":
                from effcompile.machine.machines import load_target

                load_target(name)
        find(self.file)
        return replace(self, changes=changes)

    def load(self, steps: report.Steps, plan: Plan | None = None) -> Wanted:
        """The user's model, and what is asked of it: a saved plan's goal, or that of the file changed by the command line."""
        with steps.step("load the model"):
            from effcompile.api import declare, goal_of_plan, to_training_mode
            from effcompile.compiler import Request
            from effcompile.loader.reading import load
            from effcompile.passes import load_passes, load_training_passes

            mode = self.changes.get("mode") if plan is None else plan.goal.mode
            loaded = load(self.file, replace(self.reading, training=mode == "training"))
        asked = declare(loaded.goal, self.changes) if plan is None else goal_of_plan(plan, None, self.changes, self.backend)
        training = asked.mode == "training"
        (load_training_passes if training else load_passes)(self.passes)
        if training:
            console.warn(to_training_mode(loaded.model))
        request = Request(
            goal=asked,
            target=self.targets[0],
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
    from effcompile.planner.learning_rate import LearningRate

    rate, _, batch = said.partition("@")
    try:
        given = (float(rate), int(batch))
    except ValueError:
        raise UsageError(f"--lr {said}: give a learning rate and the batch that it is good for, as 3e-4@256.") from None
    LearningRate.of(given)
    return given


def parsed_shape(text: str | None) -> tuple[int, int] | None:
    """`8x128` as (8, 128).

    Raises:
        UsageError: it is not two whole numbers of at least 1.
    """
    if text is None:
        return None
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and 0 < int(batch) < 1 << 20 and 0 < int(length) < 1 << 30):
        raise UsageError(f"--shape {text!r} is not BATCHxLENGTH. Write it like 8x128: 8 examples of 128 tokens, or images of 128 pixels.")
    return int(batch), int(length)
