"""What is asked of the compiler, as one value: `optimize`, `plan` and `frontier` of both modes take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Required, TypedDict, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from effcompile.capture.training import Loss
from effcompile.core import effort
from effcompile.core.effort import Effort
from effcompile.core.errors import UsageError, clipped
from effcompile.core.goal import Goal
from effcompile.core.types import Args, Inputs, Kwargs
from effcompile.ir.plan import Plan
from effcompile.machine.target import Target
from effcompile.planner.batch import wanted_sizes
from effcompile.planner.learning_rate import LearningRate
from effcompile.search.machine import AUTO
from effcompile.search.many_devices import ManyDevices
from effcompile.search.progress import QUIET, Progress

#: What a call does that the plan does not hold for, as the model or the arguments are not as they were.
OnChange = Literal["error", "eager", "replan"]
#: True keeps batch and sequence free, False fixes all shapes; or torch.export's dynamic shapes.
Dynamic = bool | Mapping[str, Any] | None
#: An optimizer of the model's parameters, or what makes one of them.
AnyOptimizer = Optimizer | Callable[..., Optimizer] | None
#: "auto", a range "8..64", a number of examples or several.
Batch = int | str | Sequence[int] | None


class Asked(TypedDict, total=False):
    """The fields of a Request as keyword arguments, of which only the goal has to be there."""

    goal: Required[Goal]
    target: str | Target
    backend: str | None
    plan: Plan | None
    passes: Sequence[str] | None
    dynamic: Dynamic
    calibration: Iterable[Inputs] | None
    loss: Loss | None
    keep_outputs: bool
    optimizer: AnyOptimizer
    batch: Batch
    lr: tuple[float, ...] | None
    on_change: OnChange | None
    mesh: DeviceMesh | None
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that the compiler needs but the model and its inputs.

    Attributes:
        goal: what to minimise under which limits.
        target: "auto" for this machine, a known name, a path to a target file, or a Target.
        backend: only this one; None chooses among all that run here. A training step runs on "torch".
        plan: an earlier plan of this model, applied without solving.
        passes: which passes, as `load_passes` and `load_training_passes` take them.
        dynamic: see `capture`.
        calibration: inputs to measure errors with; None generates some.
        loss: `loss(outputs, inputs)`, for a forward that returns none.
        keep_outputs: a step also returns what the model returns beside the loss, for show: to differentiate
            it is refused.
        optimizer: its states count, and are planned too.
        batch: sizes of a step's batch to choose from, see planner/batch.py; None takes that of the inputs.
        lr: a learning rate and the batch that it is good for, from which the plan says one for the batch that
            is chosen.
        on_change: what a call does that the plan does not hold for.
        mesh: the processes that run a step together, each on a part of the batch of its own; None for this
            one alone.
        effort: "low", "normal" or "high": how many seconds planning may search, see core/effort.py.
        progress: is told what is being done.
        devices: the step is divided among so many; None: one device.

    Raises:
        UsageError: something that the goal's mode does not have.
    """

    goal: Goal
    target: str | Target = AUTO
    backend: str | None = None
    plan: Plan | None = None
    passes: Sequence[str] | None = None
    dynamic: Dynamic = None
    calibration: Iterable[Inputs] | None = None
    loss: Loss | None = None
    keep_outputs: bool = False
    optimizer: AnyOptimizer = None
    batch: Batch = None
    lr: tuple[float, ...] | None = None
    on_change: OnChange | None = None
    mesh: DeviceMesh | None = None
    effort: Effort = "normal"
    progress: Progress = QUIET
    devices: ManyDevices | None = None

    def __post_init__(self) -> None:
        if self.goal.mode == "generation" and self.batch is not None:
            # there it is what the cache has room for
            object.__setattr__(self, "goal", Goal.of(self.goal, batch=_count(self.batch)))
            object.__setattr__(self, "batch", None)
        effort.check(self.effort)
        self._check_names()
        if self.calibration is not None:  # read more than once
            object.__setattr__(self, "calibration", tuple(self.calibration))
        if self.on_change not in (None, *get_args(OnChange)):
            known = ", ".join(map(repr, get_args(OnChange)))
            raise UsageError(
                f"on_change = {self.on_change!r} is not known. What a call does that the plan does not "
                f"hold for: {known}."
            )
        if self.on_change in ("replan", "eager") and self.goal.mode == "generation":
            raise UsageError(
                f"on_change={self.on_change!r} is not there for mode = 'generation', which refuses such "
                "calls. Leave it out."
            )
        if self.on_change == "replan" and self.optimizer is not None:
            raise UsageError(
                "on_change='replan' would lose the states of the planned optimizer. Leave it out, or plan "
                "without `optimizer`."
            )
        if self.on_change == "eager" and self.loss is not None:
            raise UsageError(
                "on_change='eager' runs the model's own forward, which here returns no loss. Leave out "
                "on_change, or `loss`."
            )
        if self.mesh is not None:
            self._check_mesh()
        if self.loss is not None and not callable(self.loss):
            raise UsageError(
                f"loss is a {type(self.loss).__name__}. Give a function: loss(outputs, inputs) returns a "
                "scalar tensor."
            )
        if self.devices is not None and not self.training:
            raise UsageError("devices divide a training step: ask for mode='training', or leave devices out.")
        if self.training and self.dynamic:
            raise UsageError(
                "A training plan holds for one batch shape: leave dynamic out. Without `inputs` each "
                "shape is planned."
            )
        if self.training and self.calibration is not None:
            raise UsageError("calibration measures errors, and a training plan makes none: leave it out.")
        given = {
            "keep_outputs": self.keep_outputs,
            "loss": self.loss is not None,
            "optimizer": self.optimizer is not None,
        }
        given |= {"batch": self.batch is not None, "lr": self.lr is not None}
        self._check_batch()
        if not self.training and any(given.values()):
            name = next(name for name, value in given.items() if value)
            raise UsageError(f"{name} is for a training step. Leave it out, or ask for mode='training'.")

    @property
    def offers(self) -> tuple[OnChange, ...]:
        """What else `on_change` could be for this request, where it is left out: see the refusals."""
        if self.on_change in ("replan", "eager") or self.goal.mode == "generation" or self.mesh is not None:
            return ()
        there: dict[OnChange, bool] = {"replan": self.optimizer is None, "eager": self.loss is None}
        return tuple(how for how, so in there.items() if so)

    def _check_names(self) -> None:
        named = self.passes is None or (
            not isinstance(self.passes, str) and all(isinstance(name, str) for name in self.passes)
        )
        if not named:
            raise UsageError(
                f"passes = {self.passes!r} is not usable. Give a sequence of names: passes=['quantize', "
                "'no-merge']."
            )
        if not isinstance(self.backend, (str, type(None))):
            raise UsageError(
                f"backend is a {type(self.backend).__name__}. Give the name of one, or None to choose "
                "among all."
            )

    def _check_batch(self) -> None:
        if self.batch is not None:
            wanted_sizes(self.batch)
            if self.plan is not None:
                raise UsageError(
                    "batch: a saved plan holds for the batch that it was made for. Leave batch out, or "
                    "plan again without it."
                )
        if self.lr is not None:
            LearningRate.of(self.lr)
            if self.batch is None or self.optimizer is None:
                missing = "batch" if self.batch is None else "optimizer"
                raise UsageError(
                    f"lr follows the batch by the law of the optimizer: give {missing}, too, or leave lr out."
                )

    def _check_mesh(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise UsageError(
                f"mesh = {clipped(repr(self.mesh))} is none. Give the mesh of the processes that torchrun "
                'started: init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), of torch.distributed.'
            )
        if not dist.is_initialized():
            raise UsageError(
                "The processes of this mesh have parted (dist.destroy_process_group()): plan before that, or "
                "make a new mesh."
            )
        if not self.training:
            raise UsageError("mesh is for a training step. Leave it out, or ask for mode='training'.")
        if self.on_change in ("replan", "eager"):
            raise UsageError(
                f"on_change={self.on_change!r} would be one rank's choice, and a step on a mesh is all "
                "ranks'. Leave it out."
            )
        if self.batch is not None:
            raise UsageError(
                "batch: on a mesh a step has the batch of each rank's inputs. Leave batch out, or choose "
                "it on one device."
            )
        if isinstance(self.optimizer, Optimizer):
            raise UsageError(
                "The optimizer of a step on a mesh is of the sharded parameters, which are there only when "
                "it is planned: give what makes it (optimizer=torch.optim.AdamW, or a function of the "
                "parameters), or leave `optimizer` out, and make it of the returned model's parameters()."
            )

    @property
    def training(self) -> bool:
        return self.goal.mode == "training"

    @property
    def anew(self) -> Request:
        """The same request without its plan: what is made now is solved."""
        return replace(self, plan=None)

    @property
    def asked(self) -> Asked:
        """What planning takes in this mode, as keyword arguments."""
        common: Asked = {
            "goal": self.goal,
            "target": self.target,
            "passes": self.passes,
            "progress": self.progress,
        }
        if self.training:
            own: Asked = {
                "goal": self.goal,
                "loss": self.loss,
                "keep_outputs": self.keep_outputs,
                "optimizer": self.optimizer,
            }
            return {**common, **own, "batch": self.batch, "lr": self.lr}
        return {**common, "backend": self.backend, "dynamic": self.dynamic, "calibration": self.calibration}

    @property
    def whole(self) -> Asked:
        """What planning and carrying out take in this mode, as keyword arguments."""
        found: Asked = {**self.asked, "backend": self.backend, "plan": self.plan}
        return found if self.mesh is None else {**found, "mesh": self.mesh}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model at its example inputs, and what is asked of it. The model is left as it is."""

    model: nn.Module
    args: Args
    kwargs: Kwargs
    request: Request

    @classmethod
    def of(cls, model: nn.Module, args: Args, kwargs: Kwargs, asked: Asked) -> Task:
        """From an entry's arguments.

        Raises:
            UsageError: something that the goal's mode does not have.
        """
        return cls(model=model, args=args, kwargs=kwargs, request=Request(**asked))

    def for_plan(self, plan: Plan) -> Task:
        """The same with the goal that a saved plan was made for, on this machine."""
        return replace(self, request=replace(self.request, goal=plan.goal, target=AUTO))


def _count(batch: Batch) -> object:
    """A number that was given as text on the command line; the rest is Goal's to judge."""
    return int(batch) if isinstance(batch, str) and batch.isdecimal() else batch
