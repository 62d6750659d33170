"""Plan a run: every stage under one budget, on a copy of the model that goes through all changes, before
anything runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from effcompile.api import plan
from effcompile.capture.training import Loss
from effcompile.compiler import Batch
from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.ir.plan import Plan
from effcompile.machine.target import Target
from effcompile.planner.learning_rate import LearningRate, law
from effcompile.runs.carry import group_names, names_of, of_changed
from effcompile.runs.entering import enter
from effcompile.runs.examples import examples_of
from effcompile.runs.fields import FIELDS, LAYERED
from effcompile.runs.fields.base import Graph
from effcompile.runs.flops import step_flops
from effcompile.runs.layers import find_layers
from effcompile.runs.pricing import Priced, limits
from effcompile.runs.run import Run
from effcompile.runs.stage import Stage
from effcompile.runs.suggest import check, suggested

#: Fields that leave the model as it is.
_HARMLESS = frozenset({"precision", "average", "data", "layers"})


def schedule(
    model: nn.Module,
    stages: Sequence[Stage] | Literal["auto"],
    *,
    inputs: Callable[[Stage], Example],
    optimizer: Optimizer | Callable[..., Optimizer],
    memory: int | str | None = None,
    max_error: float | None = None,
    batch: Batch = None,
    lr: tuple[float, ...] | None = None,
    loss: Loss | None = None,
    passes: Sequence[str] | None = None,
    target: str | Target = "auto",
    steps: int | None = None,
) -> Run:
    """Plan a training run stage by stage under one budget.

    Args:
        model: an nn.Module in training mode. The run changes it in place, stage by stage; planning does not.
        stages: what holds for how many steps; "auto" suggests growth of depth for `steps` steps by short runs
            on the example inputs.
        inputs: a stage → its example inputs, as `optimize` takes them.
        optimizer: of the model's parameters, or optimizer(parameters) that returns one. Its states are
            carried through the stages.
        memory: peak bytes of every stage's step.
        max_error: of the gradient.
        batch: sizes of the batch to choose from in every stage.
        lr: the batch at which the learning rates of the optimizer's groups are good, with the first of them:
            (3e-4, 256); the critical batch behind them where it was measured (`critical_batch`). In every
            stage they follow its batch by the law of the optimizer.
        loss: see `optimize`.
        passes: see `optimize`.
        target: see `optimize`. Stages for a machine that is not here are planned, not run.
        steps: of the whole run, for stages="auto".

    Raises:
        UsageError: something that is asked for cannot be. InfeasibleError: a stage does not fit.
    """
    check(stages, steps)
    rate = None if lr is None else LearningRate.of(lr)
    made = (
        optimizer
        if isinstance(optimizer, Optimizer)
        else optimizer([p for p in model.parameters() if p.requires_grad])
    )
    if rate is not None:
        law(type(made).__name__)  # raises where none is known
    model.train()
    why = ""
    if isinstance(stages, str):

        def seconds(stage: Stage) -> float:
            [priced] = schedule(
                model, [stage], inputs=inputs, optimizer=made, memory=memory, max_error=max_error,
                batch=batch, loss=loss, passes=passes, target=target,
            ).priced  # fmt: skip
            return priced.seconds

        stages, why = suggested(model, steps, inputs, made, seconds)
    whole = tuple(_with_defaults(stage, batch, max_error, passes) for stage in stages)
    _check(whole)
    run = Run(
        model=model,
        stages=whole,
        priced=[],
        notes=[[] for _ in whole],
        examples=[inputs(stage) for stage in whole],
        optimizer=made,
        common={"target": target, "loss": loss},
        memory=memory,
        rate=rate,
        layers=find_layers(model).name
        if any(getattr(stage, name) is not None for stage in whole for name in LAYERED)
        else "",
    )
    _plan_all(run)
    run.notes[0].extend([why] if why else [])
    return run


def _check(stages: Sequence[Stage]) -> None:
    for name, field in FIELDS.items():
        field.check_order(stages)
        if name == "precision" and any(
            stage.precision not in (None, "fp32") and stage.max_error is None for stage in stages
        ):
            raise UsageError(
                "Stage(precision=...) changes numbers: say what error of the gradient is allowed, "
                "max_error=0.02 is usual for bf16."
            )


def _plan_all(run: Run) -> None:
    """Plan the stages on a model that goes through their changes: a copy, where any changes it."""
    changing = any(
        getattr(stage, name) is not None for stage in run.stages for name in FIELDS.keys() - _HARMLESS
    )
    model, optimizer = run.model, run.optimizer
    if changing:
        model = copy.deepcopy(run.model)
        optimizer = of_changed(run.optimizer, group_names(run.optimizer, names_of(run.model)), model, {})
    for number, (stage, example) in enumerate(zip(run.stages, run.examples, strict=True)):
        entered = enter(model, optimizer, {}, stage, number, run.layers, example)
        entered.begin()
        graphs, budgets = entered.graphs, limits(entered, run.memory, run.common["target"])
        plans: list[Plan] = []
        flops: list[float | None] = []
        for graph, memory in zip(graphs, budgets.memory, strict=True):
            with entered.around(graph):
                flops.append(step_flops(model, example, run.common["loss"]))
                plans.append(plan(
                    model, example, mode="training", optimizer=None if plans else entered.optimizer,
                    passes=entered.passes, memory=memory,
                    batch=plans[0].batch if plans and stage.batch is not None else stage.batch,
                    max_error=stage.max_error, **run.common,
                ))  # fmt: skip
        size = sum(p.numel() for p in model.parameters())
        entered.end()
        run.priced.append(Priced(
            plans=tuple(plans), graphs=graphs, beside=budgets.beside, states=budgets.states, parameters=size,
            flops=_of_batch(flops, graphs, plans[0], example),
        ))  # fmt: skip
        run.notes[number], optimizer = entered.notes, entered.optimizer


def _of_batch(
    flops: Sequence[float | None], graphs: Sequence[Graph], plan: Plan, example: Example
) -> float | None:
    """The expected FLOPs of a step of the batch that was chosen, from those of the example inputs: they grow
    with the examples.
    """
    known = [graph.share * count for graph, count in zip(graphs, flops, strict=True) if count is not None]
    grown = (plan.batch or examples_of(example)) / examples_of(example)
    return sum(known) * grown if len(known) == len(graphs) else None


def _with_defaults(
    stage: Stage, batch: Batch, max_error: float | None, passes: Sequence[str] | None
) -> Stage:
    changes: dict[str, Any] = {"batch": batch, "max_error": max_error, "passes": passes}
    whole = replace(stage, **{name: value for name, value in changes.items() if getattr(stage, name) is None})
    if coded := [item for item in whole.passes or () if item.partition(".")[0] == "frozen"]:
        raise UsageError(
            f"passes = {coded}: a run carries its weights from stage to stage as they are, so that a base is "
            "not held as codes there. Leave it out, or plan the one step by effcompile.optimize."
        )
    return whole
