"""A run: its stages with their plans, taken one after the other, saved and resumed to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.compiler import TrainingExecutable
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.types import Example, Value
from effcompile.ir.plan import Plan
from effcompile.ops.replaced_optimizer import give_back
from effcompile.planner.learning_rate import LearningRate
from effcompile.report.runs import RunMachine, StageRow, print_run, run_data
from effcompile.report.runs_html import run_html
from effcompile.runs import saving
from effcompile.runs.carry import States, group_names, names_of, states_of
from effcompile.runs.entering import Entered, enter
from effcompile.runs.examples import examples_of, units_of
from effcompile.runs.fields.average import Average
from effcompile.runs.fields.base import Graph
from effcompile.runs.fields.data import Data
from effcompile.runs.graphs import Common, drawn, planned_graphs
from effcompile.runs.plateau import Plateau
from effcompile.runs.pricing import Priced, machine_of
from effcompile.runs.stage import PLATEAU, Stage

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class Active:
    """A stage that is run: its planned model, its optimizer, and what is left of it.

    Attributes:
        model: of the graph with all layers. others: of the stage's other graphs, which steps run by turns.
    """

    run: Run
    number: int
    entered: Entered
    model: TrainingExecutable
    others: list[TrainingExecutable]
    optimizer: Optimizer

    @property
    def stage(self) -> Stage:
        return self.run.stages[self.number]

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def batch(self) -> int:
        """Examples of a step."""
        return self.run.batches[self.number]

    @property
    def left(self) -> int:
        """Steps that are left, at the most."""
        return self.run.left(self.number)

    @property
    def examples(self) -> Tensor | None:
        """Places of the examples that a stage with `data` takes; None for all."""
        return next((effect.examples for effect in self.entered.effects if isinstance(effect, Data)), None)

    def step(self, *args: Value, **kwargs: Value) -> Tensor:
        """Forward, backward and update; returns the loss.

        Raises:
            UsageError: the stage is over, or another one has begun.
        """
        if self.run.active is not self or self.left < 1:
            raise UsageError(
                f"Stage {self.number + 1} of the run is over. Take the next one: `for stage in run: ...`."
            )
        start = perf_counter()
        graph, model = self._drawn()
        with self.entered.around(graph):
            outputs = model(*args, **kwargs)
            loss: Tensor = (
                outputs
                if isinstance(outputs, Tensor)
                else outputs["loss"]
                if isinstance(outputs, Mapping)
                else outputs.loss
            )
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for effect in self.entered.effects:
            effect.stepped(self.run.model)
        self.run.took(self.number, perf_counter() - start, loss)
        return loss.detach()

    def _drawn(self) -> tuple[Graph, TrainingExecutable]:
        """The graph of this step, planned."""
        place = drawn(self.entered.graphs, self.number, self.run.done[self.number])
        return self.entered.graphs[place], (self.model, *self.others)[place]


@dataclass(kw_only=True)
class Run:
    """Stages with their plans.

    Iterate over it to run them: `for stage in run: while stage.left: stage.step(...)`.

    Attributes:
        priced: what each stage's step costs, predicted. notes: what each stage's fields say. done: steps
            taken of each.
        active: the stage that runs. layers: qualified name of the model's list of layers, "" where no field
            needs it.
    """

    model: nn.Module
    stages: tuple[Stage, ...]
    priced: list[Priced]
    notes: list[list[str]]
    examples: list[Example]
    optimizer: Optimizer
    common: Common
    memory: int | str | None = None
    rate: LearningRate | None = None
    layers: str = ""
    done: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)
    active: Active | None = None
    _rates: list[float] = field(default_factory=list)
    _entered: Entered | None = None
    _plateaus: list[Plateau] = field(default_factory=list)
    _loaded: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.done, self.timed = [0] * len(self.stages), [0] * len(self.stages)
        self.seconds = [0.0] * len(self.stages)
        self._plateaus = [Plateau(steps=stage.steps) for stage in self.stages]

    @property
    def plans(self) -> list[Plan]:
        """Of each stage's step; of several graphs that with all layers."""
        return [priced.plan for priced in self.priced]

    @property
    def batches(self) -> list[int]:
        """Examples of a step, stage by stage."""
        return [
            plan.batch or examples_of(example)
            for plan, example in zip(self.plans, self.examples, strict=True)
        ]

    def left(self, number: int) -> int:
        """Steps that are left of a stage, at the most."""
        stage = self.stages[number]
        over = stage.until == PLATEAU and self._plateaus[number].reached
        return 0 if over else stage.steps - self.done[number]

    def took(self, number: int, seconds: float, loss: Tensor) -> None:
        """A step of a stage was taken."""
        self.done[number] += 1
        self.seconds[number] += seconds
        self.timed[number] += 1
        if self.stages[number].until == PLATEAU:
            self._plateaus[number].add(float(loss.detach()))

    def __iter__(self) -> Iterator[Active]:
        """The stages that are not over, each planned, verified and ready to run when it is its turn."""
        for number in range(len(self.stages)):
            if self.left(number):
                self.active = self._begun(number)
                yield self.active
                if left := self.left(number):
                    raise UsageError(
                        f"Stage {number + 1} has {left} steps left, and the next one was asked for. Take "
                        "them all, or save the run and resume it later."
                    )

    def _begun(self, number: int) -> Active:
        entered = (
            self._entered
            if self._entered is not None and self._entered.number == number
            else self._enter(number)
        )
        priced, models = self._made(entered)
        optimizer = models[0].optimizer
        assert optimizer is not None
        entered.take_up(optimizer)
        if self._loaded is not None:
            torch.set_rng_state(self._loaded["random"])
            self._loaded = None
        for group, given in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = given * self._factor(number)
        self.priced[number] = priced
        return Active(
            run=self, number=number, entered=entered, model=models[0], others=models[1:], optimizer=optimizer
        )

    def _enter(self, number: int, *, begin: bool = True) -> Entered:
        """The model in the form of a stage, from that of the stage before."""
        states: States = {}
        optimizer = self.optimizer
        if (before := self._entered) is not None:
            before.end()
            optimizer, states = before.optimizer, before.states
            if self.active is not None or before.taken_up:
                held = optimizer if self.active is None else self.active.optimizer
                states = states_of(held, group_names(held, names_of(self.model)))
            give_back(optimizer)  # of the stage before: its states are handed on
        self._rates = self._rates_now() or [group["lr"] for group in optimizer.param_groups]
        entered = enter(
            self.model, optimizer, states, self.stages[number], number, self.layers, self.examples[number]
        )
        if entered.optimizer is not optimizer:
            self._rates = self._following(optimizer, entered.optimizer)
            self.optimizer = entered.optimizer
        else:
            entered.taken_up = before is not None and (
                before.taken_up if self.active is None else self.active.optimizer is optimizer
            )
        if begin:
            entered.begin()
        self._entered = entered
        self.notes[number] = entered.notes
        return entered

    def _rates_now(self) -> list[float]:
        """The rates as given, at the batch that they are for: those set since the stage began, by hand or by
        a schedule, are given.
        """
        if (active := self.active) is None:
            return self._rates
        factor, groups = self._factor(active.number), active.optimizer.param_groups
        return [
            given if group["lr"] == given * factor else group["lr"] / factor
            for given, group in zip(self._rates, groups, strict=True)
        ]

    def _following(self, before: Optimizer, after: Optimizer) -> list[float]:
        """The given rates of groups that may have been split: each by its factor."""
        present = [group["lr"] for group in before.param_groups]
        if len(after.param_groups) == len(present):
            return self._rates
        return [group["lr"] for group in after.param_groups]

    def _made(self, entered: Entered) -> tuple[Priced, list[TrainingExecutable]]:
        """The planned models of the stage's graphs, and what they cost."""
        number = entered.number
        batch = None if entered.stage.batch is None else self.batches[number]
        made = planned_graphs(self.model, entered, self.examples[number], batch, self.memory, self.common)
        return replace(
            self.priced[number], plans=tuple(one.plan for one in made), graphs=entered.graphs
        ), made

    def _factor(self, number: int) -> float:
        """What the law of the optimizer makes of its learning rates at the stage's batch."""
        if self.rate is None:
            return 1.0
        return self.rate.at(self.batches[number], type(self.optimizer).__name__) / self.rate.rate

    def averaged(self) -> nn.Module:
        """A copy of the model with the mean of the last checkpoints of the stage that runs, which has
        `average`.

        Raises:
            UsageError: it has none, or no checkpoint was taken yet.
        """
        effects = [] if self._entered is None else self._entered.effects
        found = next((effect for effect in effects if isinstance(effect, Average)), None)
        if found is None:
            raise UsageError(
                "No stage with average=... is running. Write Stage(steps=..., average=5) and take its "
                "steps first."
            )
        return found.averaged(self.model)

    # ------------------------------------------------------------ what it says

    def rows(self) -> list[StageRow]:
        """The stages as they are printed."""
        return [
            StageRow(
                name=stage.name or stage.sizes or f"stage {number + 1}",
                plan=priced.plan,
                steps=stage.steps,
                batch=self.batches[number],
                rate=self._first_rate * self._factor(number) if self.rate is not None else None,
                taken=self.timed[number],
                spent=self.seconds[number],
                seconds=priced.seconds,
                peak=priced.peak,
                notes=tuple(self.notes[number]),
                over=self.left(number) == 0,
                units=units_of(self.examples[number]),
                flops=priced.flops,
                parameters=priced.parameters,
            )
            for number, (stage, priced) in enumerate(zip(self.stages, self.priced, strict=True))
        ]

    @property
    def _first_rate(self) -> float:
        return self._rates[0] if self._rates else float(self.optimizer.param_groups[0]["lr"])

    def report(self, console: Console | None = None) -> None:
        """Print the stages, and what they come to."""
        print_run(self.rows(), self.machine, console)

    @property
    def machine(self) -> RunMachine:
        """What the target takes by the hour, where it states that."""
        return machine_of(self.common["target"])

    def html(self) -> str:
        """The report as one page."""
        return run_html(self.rows(), self.machine)

    def to_dict(self) -> dict[str, object]:
        """Stages, plans and what they come to, as JSON has it."""
        return run_data(self.rows(), [saving.plain(stage) for stage in self.stages], self.machine)

    # ------------------------------------------------------------ saved and resumed

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write parameters, buffers, optimizer states, the random generator and how far the run is: whole or
        not at all.

        Raises:
            UsageError: the file cannot be written.
        """
        entered, states = self._entered, {}
        if self.active is not None:
            states = states_of(
                self.active.optimizer, group_names(self.active.optimizer, names_of(self.model))
            )
        saving.write(
            Path(file),
            {
                "stages": [repr(stage) for stage in self.stages],
                "batches": self.batches,
                "done": self.done,
                "at": -1 if entered is None else entered.number,
                "model": self.model.state_dict(),
                "states": states,
                "effects": {}
                if entered is None
                else {effect.name: dict(effect.state()) for effect in entered.effects},
                "plateaus": [plateau.losses for plateau in self._plateaus],
                "random": torch.get_rng_state(),
                "rates": self._rates_now(),
            },
        )

    def resume(self, file: str | os.PathLike[str]) -> None:
        """Go on where `save` was called, in a run of the same stages that has not begun.

        Raises:
            UsageError: the run has begun, or there is no such file. FormatError: it is of other stages, or
                not one of ours.
        """
        if self.active is not None or self._entered is not None:
            raise UsageError(
                "This run has begun. Make it anew with effcompile.schedule(...), and resume that."
            )
        held = saving.read(Path(file))
        if (
            held["stages"] != [repr(stage) for stage in self.stages]
            or held["batches"] != self.batches
            or held["at"] >= len(self.stages)
        ):
            raise FormatError(
                f"{os.fspath(file)} is of other stages or batches: {held['stages']}, {held['batches']}. "
                "Nothing was loaded."
            )
        for number in range(held["at"] + 1):
            self._enter(number, begin=number == held["at"])
        self.model.load_state_dict(held["model"])
        if (entered := self._entered) is not None:
            entered.states, self._rates = held["states"], held["rates"]
            for effect in entered.effects:
                effect.load(held["effects"][effect.name])
            if any(effect.moves_states for effect in entered.effects):
                entered.take_up(entered.optimizer)
        self.done = list(held["done"])
        for plateau, losses in zip(self._plateaus, held["plateaus"], strict=True):
            plateau.losses = list(losses)
        self._loaded = held
