"""What the commands `optimize`, `plan` and `frontier` have in common: a job, whose fields are their options.

torch takes seconds to import: it is, with the user's model, when the job is loaded.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effcompile import console, report
from effcompile.cli.options import (
    AllowPickle,
    BackendName,
    Batch,
    BatchTokens,
    Context,
    DeviceCount,
    Dynamic,
    GlobalBatch,
    HowLong,
    KeepOutputs,
    LearningRate,
    MaxError,
    Memory,
    Minimize,
    Mode,
    ModelFile,
    New,
    Nodes,
    PassNames,
    Prompt,
    Reads,
    Robust,
    Shape,
    StrategyText,
    TargetName,
    Task,
    TrustRemoteCode,
)
from effcompile.cli.strategy import parse_strategy
from effcompile.core.errors import UsageError, clipped
from effcompile.core.garbage import uncollected
from effcompile.core.goal import Goal
from effcompile.core.names import check_backend, check_passes
from effcompile.ir.plan import Plan
from effcompile.loader.source import Reading, find
from effcompile.loader.weights import check_source
from effcompile.machine.cluster import parse_nodes

if TYPE_CHECKING:
    from effcompile.compiler import Executable, Request, TrainingExecutable
    from effcompile.loader.loaded import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """The options that say among which devices a step is divided, as they were typed."""

    devices: DeviceCount = None
    nodes: Nodes = None
    strategy: StrategyText = None
    global_batch: GlobalBatch = None
    batch_tokens: BatchTokens = None

    def check(self) -> None:
        """Check all that can be before torch loads.

        Raises:
            UsageError: a value that is not allowed, or one without --devices.
        """
        others = {
            "--strategy": self.strategy,
            "--global-batch": self.global_batch,
            "--batch-tokens": self.batch_tokens,
        }
        if self.count is None and (given := [name for name, value in others.items() if value is not None]):
            raise UsageError(f"{given[0]} is for a step on many devices: give --devices or --nodes, too.")
        parse_strategy(self.strategy or "")

    @property
    def count(self) -> int | Literal["auto"] | None:
        """The number of devices, which --nodes gives as well; None: one device is planned for.

        Raises:
            UsageError: another text than a number or `auto`.
        """
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
        from effcompile.search.many_devices import ManyDevices

        if many.count is None:
            return self
        devices = ManyDevices.of(
            many.count, nodes=many.nodes, strategy=parse_strategy(many.strategy or ""),
            global_batch=many.global_batch, batch_tokens=many.batch_tokens,
        )  # fmt: skip
        return replace(self, request=replace(self.request, devices=devices))

    def carried_out(self) -> Executable | TrainingExecutable:
        """Planned, lowered, verified and measured."""
        from effcompile.modes import carry_out

        with self.loaded.telling():
            made = carry_out(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs)
        made.plan = self._noted(made.plan)
        return made

    def planned(self) -> Plan:
        """Decided; nothing is lowered."""
        from effcompile.modes import make_plan

        with self.loaded.telling():
            made = make_plan(self.request, self.loaded.model, self.loaded.args, self.loaded.kwargs)
        return self._noted(made)

    def for_target(self, target: str) -> Wanted:
        """The same asked of another machine."""
        return replace(self, request=replace(self.request, target=target))

    def frontier(self, points: int | None) -> list[Plan]:
        """Plans along the memory-time front."""
        from effcompile.modes import make_frontier

        model, args, kwargs = self.loaded.model, self.loaded.args, self.loaded.kwargs
        with self.loaded.telling():
            return make_frontier(self.request, model, args, kwargs, points)

    def _noted(self, plan: Plan) -> Plan:
        """With what was done to the model or its inputs before it was planned."""
        return plan.with_changes(notes=(*plan.notes, *self.loaded.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `optimize`, `plan` and `frontier` are all asked, as it was typed: `spread` makes an option of each
    field.
    """

    model: ModelFile
    task: Task = None
    shape: Shape = None
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    memory: Memory = None
    max_error: MaxError = None
    minimize: Minimize = None
    mode: Mode = None
    reads: Reads = None
    robust: Robust = None
    keep_outputs: KeepOutputs = False
    batch: Batch = None
    tokens: Context = None
    prompt: Prompt = None
    new: New = None
    lr: LearningRate = None
    target: TargetName = "auto"
    backend: BackendName = None
    passes: PassNames = None
    dynamic: Dynamic = None
    effort: HowLong = "normal"

    @property
    def changes(self) -> dict[str, object]:
        """The goal fields that were given."""
        fields = {
            name: getattr(self, name)
            for name in ("memory", "max_error", "minimize", "mode", "reads", "robust", "prompt", "new")
        }
        return {
            name: value for name, value in {**fields, "context": self.tokens}.items() if value is not None
        }

    @property
    def reading(self) -> Reading:
        """How the model is to be read."""
        return Reading(
            task=self.task,
            shape=parsed_shape(self.shape),
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )

    @property
    def targets(self) -> list[str]:
        """The machines that are named: one, or several with commas between."""
        return (
            [self.target] if Path(self.target).exists() else [name.strip() for name in self.target.split(",")]
        )

    def check(self) -> None:
        """Check all that can be before torch and the model load.

        Raises:
            UsageError: a goal, model, pass, backend or target that does not exist or is not allowed.
        """
        Goal.of(**self.changes)
        parsed_shape(self.shape)
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
        check_source(find(self.model), self.reading)

    def load(self, steps: report.ProgressSteps, plan: Plan | None = None) -> Wanted:
        """The user's model, and what is asked of it: a saved plan's goal, or that of the file changed by the
        command line.
        """
        # what is imported stays: looking for circles in it took a tenth of the step
        with steps.step("load the model"), uncollected():
            from effcompile.ops import ahead  # before the others, which take seconds of their own

            mode = self.mode if plan is None else plan.goal.mode
            if mode in (None, "inference", "generation") and self.targets[0] == "auto":
                ahead.begin(exact=not self.changes.get("max_error"), steps=mode == "generation")
            elif mode == "training" and self.targets[0] == "auto":
                from effcompile.search.machine import calibrated_alone

                if calibrated_alone():
                    ahead.begin_training()

            from effcompile.arguments import declare, goal_of_plan, to_training_mode
            from effcompile.compiler import Request
            from effcompile.loader.reading import load
            from effcompile.passes import load_passes, load_training_passes

            reading = replace(self.reading, training=mode == "training", cache=mode == "generation")
            loaded = load(self.model, reading)
            console.keep_what_is_there()
        changes = dict(self.changes)
        if loaded.stages and not isinstance(loaded.goal, Goal):
            changes.setdefault("mode", dict(loaded.goal or {}).get("mode", "training"))
        asked = (
            declare(loaded.goal, changes)
            if plan is None
            else goal_of_plan(plan, None, self.changes, self.backend)
        )
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
            effort=self.effort,
            progress=steps,
        )
        return Wanted(loaded=loaded, request=request)


def spread(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose dataclass parameters are spread: each of their fields, but those left out, is an option
    of the command's own.
    """

    def around(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shown: list[inspect.Parameter] = []
        fields: dict[str, tuple[type, list[str]]] = {}
        for name, parameter in own.parameters.items():
            kind = parameter.annotation
            there = [parameter]
            if isinstance(kind, type) and is_dataclass(kind):
                there = [
                    one
                    for one in inspect.signature(kind, eval_str=True).parameters.values()
                    if one.name not in left_out
                ]
                fields[name] = kind, [one.name for one in there]
            shown += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in there]

        @functools.wraps(command)
        def run(**given: object) -> None:
            made = {
                name: kind(**{one: given.pop(one) for one in names}) for name, (kind, names) in fields.items()
            }
            command(**made, **given)

        vars(run)["__signature__"] = own.replace(parameters=shown)
        return run

    return around


def parsed_rate(said: str) -> tuple[float, ...]:
    """Return "3e-4@256" as a learning rate and its batch, "3e-4@256/4096" with the critical batch behind
    them.

    Raises:
        UsageError: it is none.
    """
    from effcompile.planner.learning_rate import LearningRate

    rate, _, batches = said.partition("@")
    batch, *critical = batches.split("/")
    try:
        given = (float(rate), int(batch), *map(float, critical))
    except ValueError:
        text = (
            "give a learning rate and the batch that it is good for, as 3e-4@256 (3e-4@256/4096: with "
            "the critical batch)."
        )
        raise UsageError(f"--lr {said}: {text}") from None
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
    if not (
        batch.isdecimal() and length.isdecimal() and 0 < int(batch) < 1 << 20 and 0 < int(length) < 1 << 30
    ):
        raise UsageError(
            f"--shape {text!r} is not BATCHxLENGTH. Write it like 8x128: 8 examples of 128 tokens, or "
            "images of 128 pixels."
        )
    return int(batch), int(length)
