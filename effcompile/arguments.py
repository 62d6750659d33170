"""What the arguments of the entry points say: a goal, inputs, many devices, who is told of the progress."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from effcompile import report
from effcompile.capture.training import Loss
from effcompile.compiler import QUIET, AnyOptimizer, Batch, Dynamic, OnChange, Progress, Request
from effcompile.core.effort import Effort
from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal, GoalLimits
from effcompile.core.types import Example, Inputs, Outputs
from effcompile.ir.plan import Plan
from effcompile.ir.strategy import Strategy, StrategyFields
from effcompile.loader.loaded import as_inputs
from effcompile.machine.target import Target
from effcompile.search.many_devices import Devices, ManyDevices

#: A module, or a function of tensors.
Model = nn.Module | Callable[..., Outputs]
GoalLike = Goal | Mapping[str, object] | None
PlanLike = Plan | str | os.PathLike[str] | None


class Options(GoalLimits, total=False):
    """What `optimize` takes beside the model, its inputs, and what tells which kind of result it returns."""

    target: str | Target
    backend: str | None
    optimizer: AnyOptimizer
    batch: Batch
    lr: tuple[float, ...] | None
    passes: Sequence[str] | None
    dynamic: Dynamic
    calibration: Iterable[Example] | None
    loss: Loss | None
    keep_outputs: bool
    on_change: OnChange | None
    mesh: DeviceMesh | None
    effort: Effort
    progress: bool | Progress


def many_devices(
    devices: Devices | None,
    nodes: str | None,
    strategy: Strategy | StrategyFields | None,
    global_batch: int | None,
    batch_tokens: int | None,
) -> ManyDevices | None:
    """What is asked of many devices; None: one is planned for."""
    if devices is None:
        beside = {
            "nodes": nodes,
            "strategy": strategy,
            "global_batch": global_batch,
            "batch_tokens": batch_tokens,
        }
        if given := [name for name, value in beside.items() if value is not None]:
            raise UsageError(f"{given[0]} is for a step on many devices: give devices, too.")
        return None
    return ManyDevices.of(
        devices, nodes=nodes, strategy=strategy, global_batch=global_batch, batch_tokens=batch_tokens
    )


def told(progress: bool | Progress) -> Progress:
    """Who is told what is being done.

    Raises:
        UsageError: it cannot be told.
    """
    if isinstance(progress, bool):
        return report.Shown() if progress else QUIET
    if not all(callable(getattr(progress, name, None)) for name in ("step", "update")):
        raise UsageError(
            f"progress = {progress!r}: give True, False, or an object with step(name) and update(name, "
            "done, total)."
        )
    return progress


def ready(model: nn.Module, request: Request, stacklevel: int = 3) -> nn.Module:
    """The model, in training mode when its training step is planned: a model from `from_pretrained` is in
    eval mode.
    """
    if request.training and (said := to_training_mode(model)):
        warnings.warn(said, stacklevel=stacklevel)
    return model


def to_training_mode(model: nn.Module) -> str:
    """Put a model that is in eval mode into training mode; what was done, "" where nothing was."""
    if model.training or (next(model.children(), None) is None and next(model.parameters(), None) is None):
        return ""
    model.train()
    return (
        f"{type(model).__name__} was in eval mode; effcompile put it in training mode (model.train()), "
        "as its training step is planned."
    )


def declare(goal: GoalLike, changes: Mapping[str, object]) -> Goal:
    """The goal with its changes; a dict of goal fields will do for a goal.

    Raises:
        UsageError: a value that is not allowed.
    """
    if named := next((name for name in ("devices", "nodes", "strategy") if name in changes), None):
        raise UsageError(
            f"{named} is of effcompile.plan, which divides a step among devices that need not be there. To "
            "carry one out, give mesh=init_device_mesh(...) in each process that torchrun starts."
        )
    base = (
        Goal.of(**{str(name): value for name, value in goal.items()}) if isinstance(goal, Mapping) else goal
    )
    return Goal.of(base, **changes)


def goal_of_plan(plan: Plan, goal: GoalLike, changes: Mapping[str, object], backend: str | None) -> Goal:
    """The goal that a saved plan was made for; nothing else can be asked of it.

    Raises:
        UsageError: another goal or backend than the plan's.
    """
    if declare(plan.goal if goal is None else goal, changes) != plan.goal:
        raise UsageError(
            f"The plan was made for another goal: {plan.goal.describe()}. Leave the goal out, or plan "
            "again without it."
        )
    if backend is not None and backend != plan.backend:
        raise UsageError(
            f"The plan is for the backend {plan.backend!r}, not {backend!r}. Leave the backend out, or "
            "plan again without it."
        )
    return plan.goal


def inputs_to_calibrate(given: Iterable[Example] | None) -> tuple[Inputs, ...] | None:
    """Calibration inputs taken apart, each given like `inputs`."""
    return (
        None if given is None else tuple(as_inputs(one, f"calibration[{i}]") for i, one in enumerate(given))
    )
