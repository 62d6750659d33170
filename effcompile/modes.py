"""Each request is carried out by the driver of its mode: inference, training, generation, on one device or
many.
"""

from __future__ import annotations

import os
import threading

from torch import nn

from effcompile import compiler
from effcompile.compiler import Executable, Request, TrainingExecutable
from effcompile.compiler.generation import generating
from effcompile.core import effort
from effcompile.core.errors import UsageError
from effcompile.core.garbage import seldom_collected
from effcompile.core.types import Args, Kwargs
from effcompile.ir.plan import Plan
from effcompile.runtime.meeting import attended

#: Held while a model is captured, planned and verified: torch traces one model at a time, and timings want
#: the machine for themselves.
PLANNING = threading.RLock()
# A process that is forked meanwhile would wait for ever for a thread that it does not have.
os.register_at_fork(
    before=PLANNING.acquire, after_in_parent=PLANNING.release, after_in_child=PLANNING.release
)

Planned = Executable | TrainingExecutable


def carry_out(
    request: Request, model: nn.Module, args: Args, kwargs: Kwargs, *, hold: bool = True
) -> Planned:
    """Capture, plan, lower and verify the model at these inputs. One thread at a time: others wait.

    `hold`: whether a training step's codes take the place of the model's frozen weights at once.

    Raises:
        UsageError: the model has no values to run. Else of its mode.
    """
    with attended(request.mesh), PLANNING, effort.within(request.effort):
        _refuse_meta(model)
        if request.goal.mode == "generation":
            return generating().optimize_generation(model, args, kwargs, **request.whole)
        if request.training:
            if request.mesh is not None:
                return compiler.optimize_on_ranks(model, args, kwargs, **request.whole)
            with seldom_collected():
                return compiler.optimize_training(model, args, kwargs, hold=hold, **request.whole)
        return compiler.optimize(model, args, kwargs, **request.whole)


def _refuse_meta(model: nn.Module) -> None:
    """Raises UsageError for a model without values, as what is carried out is compared with it."""
    values = (*model.named_parameters(), *model.named_buffers())
    if name := next((name for name, value in values if value.is_meta), None):
        raise UsageError(
            f"{name} is on the meta device, and so has no values to run. effcompile.plan decides for such a "
            "model; to carry a plan out, load its weights first (load_state_dict(..., assign=True))."
        )


def make_plan(request: Request, model: nn.Module, args: Args, kwargs: Kwargs) -> Plan:
    """Decide at these inputs; nothing is lowered."""
    with PLANNING, effort.within(request.effort):
        if request.devices is not None:
            return compiler.plan_devices(model, args, kwargs, request, progress=request.progress)
        if request.goal.mode == "generation":
            return generating().plan_generation(model, args, kwargs, **request.asked)
        return (compiler.plan_parts if request.training else compiler.make_plan)(
            model, args, kwargs, **request.asked
        )


def make_frontier(
    request: Request, model: nn.Module, args: Args, kwargs: Kwargs, points: int | None
) -> list[Plan]:
    """Plans along the memory-time front; None for as many as the mode usually has."""
    made = compiler.frontier_training if request.training else compiler.frontier
    if request.goal.mode == "generation":
        made = generating().frontier_generation
    with PLANNING, effort.within(request.effort):
        return (
            made(model, args, kwargs, **request.asked)
            if points is None
            else made(model, args, kwargs, points=points, **request.asked)
        )
