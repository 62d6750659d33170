"""A run is a sequence of plans: what holds for a while, and what each while costs.

Every stage is planned under one budget before anything runs. Parameters are the model's throughout; the optimizer's states are carried
from each stage to the next. A plan is a run of one stage.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.api import optimize, plan
from effcompile.capture.training import Loss
from effcompile.compiler import Batch, TrainingExecutable
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.files import write_atomically
from effcompile.core.types import Example, Value
from effcompile.ir.plan import Plan
from effcompile.loader.loaded import as_inputs
from effcompile.machine.target import Target
from effcompile.passes.training.microbatch import examples_in
from effcompile.planner.learning_rate import LearningRate, law
from effcompile.report.runs import StageRow, print_run

if TYPE_CHECKING:
    from rich.console import Console

#: The form of what `Run.save` writes.
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What holds for a while.

    Attributes:
        steps: how many. name: in the report.
        sequence: tokens of an example. image: pixels of a side. Both are for `inputs`, which makes the stage's example inputs.
        batch: sizes of the batch to choose from, see `optimize`; None takes the run's, or that of the example inputs.
        max_error: of the gradient; None takes the run's. passes: which passes; None takes the run's.

    Raises:
        UsageError: a number that is none.
    """

    steps: int
    name: str = ""
    sequence: int | None = None
    image: int | None = None
    batch: Batch = None
    max_error: float | None = None
    passes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "sequence", "image"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"Stage({name}={value!r}): a number of at least 1 is wanted.")

    @property
    def sizes(self) -> str:
        """Its sizes in words."""
        return " ".join(f"{name} {value}" for name in ("sequence", "image") if (value := getattr(self, name)) is not None)


class _Common(TypedDict, total=False):
    """What all stages are planned with."""

    target: str | Target
    memory: int | str | None
    loss: Loss | None


@dataclass(kw_only=True)
class Active:
    """A stage that is run: its planned model, its optimizer, and what is left of it.

    Attributes:
        batch: examples of a step.
    """

    run: Run
    number: int
    model: TrainingExecutable
    optimizer: Optimizer

    @property
    def stage(self) -> Stage:
        return self.run.stages[self.number]

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def batch(self) -> int:
        return self.run.batches[self.number]

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self.stage.steps - self.run.done[self.number]

    def step(self, *args: Value, **kwargs: Value) -> Tensor:
        """Forward, backward and update; returns the loss.

        Raises:
            UsageError: the stage is over, or another one has begun.
        """
        if self.run.active is not self or self.left < 1:
            raise UsageError(f"Stage {self.number + 1} of the run is over. Take the next one: `for stage in run: ...`.")
        start = perf_counter()
        outputs = self.model(*args, **kwargs)
        loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.done[self.number] += 1
        self.run.seconds[self.number] += perf_counter() - start
        self.run.timed[self.number] += 1
        return loss.detach()


@dataclass(kw_only=True)
class Run:
    """Stages with their plans. Iterate over it to run them: `for stage in run: while stage.left: stage.step(...)`.

    Attributes:
        plans: of each stage's step, predicted. done: steps taken of each. active: the stage that runs.
    """

    model: nn.Module
    stages: tuple[Stage, ...]
    plans: list[Plan]
    examples: list[Example]
    optimizer: Optimizer
    common: _Common
    rate: LearningRate | None = None
    done: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)
    active: Active | None = None
    _rates: list[float] = field(default_factory=list)
    _loaded: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.done, self.timed = [0] * len(self.stages), [0] * len(self.stages)
        self.seconds = [0.0] * len(self.stages)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def batches(self) -> list[int]:
        """Examples of a step, stage by stage."""
        return [plan.batch or _examples(example) for plan, example in zip(self.plans, self.examples, strict=True)]

    def __iter__(self) -> Iterator[Active]:
        """The stages that are not over, each planned, verified and ready to run when it is its turn."""
        for number, stage in enumerate(self.stages):
            if self.done[number] < stage.steps:
                self.active = self._begun(number)
                yield self.active
                if self.done[number] < stage.steps:
                    raise UsageError(
                        f"Stage {number + 1} has {stage.steps - self.done[number]} steps left, and the next one was asked for. Take them "
                        "all, or save the run and resume it later."
                    )

    def _begun(self, number: int) -> Active:
        before, stage = self.active, self.stages[number]
        made = optimize(
            self.model, inputs=self.examples[number], mode="training", optimizer=self.optimizer,
            batch=None if stage.batch is None else self.batches[number],
            passes=stage.passes, max_error=stage.max_error, **self.common,
        )  # fmt: skip
        optimizer = made.optimizer
        assert optimizer is not None
        if before is not None and before.optimizer is not optimizer:
            _carried(before.optimizer, optimizer, number)
        if self._loaded is not None:
            optimizer.load_state_dict(dict(self._loaded["optimizer"]))
            torch.set_rng_state(self._loaded["random"])
            self._loaded = None
        for group, given in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = given * self._factor(number)
        self.plans[number] = made.plan
        return Active(run=self, number=number, model=made, optimizer=optimizer)

    def _factor(self, number: int) -> float:
        """What the law of the optimizer makes of its learning rates at the stage's batch."""
        if self.rate is None:
            return 1.0
        return self.rate.at(self.batches[number], type(self.optimizer).__name__) / self.rate.rate

    def report(self, console: Console | None = None) -> None:
        """Print the stages, and what they come to."""
        print_run(
            [
                StageRow(
                    name=stage.name or stage.sizes or f"stage {number + 1}", plan=plan, steps=stage.steps, batch=self.batches[number],
                    rate=self._rates[0] * self._factor(number) if self.rate is not None else None, taken=self.timed[number],
                    seconds=self.seconds[number],
                )
                for number, (stage, plan) in enumerate(zip(self.stages, self.plans, strict=True))
            ],
            console,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Stages, plans and what they come to, as JSON has it."""
        whole = sum(stage.steps * (plan.predicted.seconds or 0.0) for stage, plan in zip(self.stages, self.plans, strict=True))
        rows = [
            {**asdict(stage), "examples": batch, "plan": plan.to_dict()}
            for stage, batch, plan in zip(self.stages, self.batches, self.plans, strict=True)
        ]
        return {"stages": rows, "seconds": whole, "steps": sum(stage.steps for stage in self.stages)}

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write parameters, buffers, optimizer states, the random generator and how far the run is: whole or not at all.

        Raises:
            UsageError: the file cannot be written.
        """
        optimizer = self.optimizer if self.active is None else self.active.optimizer
        held = {
            "version": _VERSION, "stages": [repr(stage) for stage in self.stages], "done": self.done, "batches": self.batches,
            "model": self.model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state(),
        }  # fmt: skip
        buffer = io.BytesIO()
        torch.save(held, buffer)
        write_atomically(Path(file), buffer.getvalue())

    def resume(self, file: str | os.PathLike[str]) -> None:
        """Go on where `save` was called, in a run of the same stages that has not begun.

        Raises:
            UsageError: the run has begun, or there is no such file. FormatError: it is of other stages, or not one of ours.
        """
        if self.active is not None:
            raise UsageError("This run has begun. Make it anew with effcompile.schedule(...), and resume that.")
        held = _read(Path(file))
        if held["stages"] != [repr(stage) for stage in self.stages] or held["batches"] != self.batches:
            raise FormatError(f"{os.fspath(file)} is of other stages or batches: {held['stages']}, {held['batches']}. Nothing was loaded.")
        self.model.load_state_dict(held["model"])
        self.done = list(held["done"])
        self._loaded = held


def schedule(
    model: nn.Module,
    stages: Sequence[Stage],
    *,
    inputs: Callable[[Stage], Example],
    optimizer: Optimizer | Callable[..., Optimizer],
    memory: int | str | None = None,
    max_error: float | None = None,
    batch: Batch = None,
    lr: tuple[float, int] | None = None,
    loss: Loss | None = None,
    passes: Sequence[str] | None = None,
    target: str | Target = "auto",
) -> Run:
    """Plan a training run stage by stage under one budget.

    Args:
        model: an nn.Module in training mode.
        stages: what holds for how many steps.
        inputs: a stage → its example inputs, as `optimize` takes them.
        optimizer: of the model's parameters, or optimizer(parameters) that returns one. Its states are carried through the stages.
        memory: peak bytes of every stage's step.
        max_error: of the gradient.
        batch: sizes of the batch to choose from in every stage.
        lr: the batch at which the learning rates of the optimizer's groups are good, with the first of them: (3e-4, 256). In every stage
            they follow its batch by the law of the optimizer.
        loss: see `optimize`.
        passes: see `optimize`.
        target: see `optimize`. Stages for a machine that is not here are planned, not run.

    Raises:
        UsageError: something that is asked for cannot be. InfeasibleError: a stage does not fit.
    """
    if not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise UsageError("stages: give a list of effcompile.Stage(steps=...), one for each while.")
    rate = None if lr is None else LearningRate.of(lr)
    whole = tuple(_with_defaults(stage, batch, max_error, passes) for stage in stages)
    common: _Common = {"target": target, "memory": memory, "loss": loss}
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer([p for p in model.parameters() if p.requires_grad])
    if rate is not None:
        law(type(made).__name__)  # raises where none is known
    model.train()
    examples = [inputs(stage) for stage in whole]
    plans = [
        plan(model, example, mode="training", optimizer=made, batch=stage.batch, passes=stage.passes, max_error=stage.max_error, **common)
        for stage, example in zip(whole, examples, strict=True)
    ]
    return Run(model=model, stages=whole, plans=plans, examples=examples, optimizer=made, common=common, rate=rate)


def _with_defaults(stage: Stage, batch: Batch, max_error: float | None, passes: Sequence[str] | None) -> Stage:
    changes: dict[str, Any] = {"batch": batch, "max_error": max_error, "passes": passes}
    return replace(stage, **{name: value for name, value in changes.items() if getattr(stage, name) is None})


def _examples(example: Example) -> int:
    """Examples in a stage's inputs."""
    return examples_in(*as_inputs(example))


def _carried(before: Optimizer, after: Optimizer, number: int) -> None:
    """Hand the states on.

    Raises:
        UsageError: the two hold them in different forms.
    """
    try:
        after.load_state_dict(before.state_dict())
    except FormatError as error:
        raise UsageError(
            f"Stage {number + 1} holds the optimizer's states in another form than the one before: {error} Give all stages the same, with "
            "passes=['states.eight_bit=false'] or max_error=None."
        ) from error


def _read(file: Path) -> dict[str, Any]:
    """A saved run; tensors and plain values only.

    Raises:
        UsageError: there is no such file. FormatError: it is not one of ours.
    """
    if not file.is_file():
        raise UsageError(f"There is no saved run at {str(file)!r}. Run.save(file) writes one.")
    try:
        held = torch.load(file, weights_only=True)
        if held["version"] != _VERSION:
            raise ValueError(f"version {held['version']!r}")
        wanted = {"stages": list, "done": list, "batches": list, "model": Mapping, "optimizer": dict, "random": Tensor}
        wrong = [name for name, kind in wanted.items() if not isinstance(held[name], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is a {type(held[wrong[0]]).__name__}")
    except Exception as error:
        raise FormatError(f"{str(file)!r} is not a saved run: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return dict(held)
