"""The planned model: the user's own class with the planned step in the place of its forward,
while it trains.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from operator import is_
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from effcompile.backends.torch.training import StepRunner
from effcompile.core.errors import GuardError, UsageError
from effcompile.core.types import Args, Forward, Kwargs, Outputs
from effcompile.ir.plan import Plan
from effcompile.ir.saved import save_alone
from effcompile.runtime.planned import PlannedModel


class TrainingExecutable(PlannedModel):
    """A model whose training step runs as planned. Made by `planned`, as a subclass of the model's class too.

    It shares the model's parameters, buffers, submodules and attributes, so optimizers, state_dict, HF's
    Trainer and save_pretrained see the model. In training mode with gradients enabled the planned step runs;
    in eval mode, or without gradients, the model's own forward. `optimizer` is the planned one, where one was
    given. A step after a change of what the plan took for granted is refused; `on_change` says what runs
    instead.
    """

    runner: StepRunner
    optimizer: Optimizer | None
    own_forward: Callable[..., Outputs]

    @property
    def scaler(self) -> GradScaler | None:
        """Of a step in fp16: what scales its loss within the backward.

        Its state_dict belongs in a checkpoint; call none of its methods.
        """
        return None if self.runner.loss_scale is None else self.runner.loss_scale.scaler

    def __copy__(self) -> TrainingExecutable:
        # which watches the copy from then on, and this one's goes on watching this one
        runner = copy.copy(self.runner)
        return planned(self.runner.model, runner, self.plan, self.optimizer)._in_mode_of(self)

    def __deepcopy__(self, memo: dict[int, object]) -> TrainingExecutable:
        """A copy of the model with the same plan; without an optimizer, whose states are the original's."""
        model = copy.deepcopy(self.runner.model, memo)
        return planned(model, self.runner.bound_to(model), self.plan)._in_mode_of(self)

    def _in_mode_of(self, other: nn.Module) -> TrainingExecutable:
        self.training = other.training
        return self

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            f"A planned {type(self).__name__} cannot be pickled, for its step is bound to this process. Save "
            "its state_dict() and its plan (save(folder)); effcompile.optimize(model, plan=...) applies it "
            "again without solving."
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients in place so that their norm, as of one vector, is at most `max_norm`; what it
        was, on every rank.

        As torch.nn.utils.clip_grad_norm_, but for a pipeline, of which that sees the stages of one rank. All
        ranks call it.

        Raises:
            UsageError: the step has handed its gradients to the optimizer. RuntimeError: the norm is not
                finite, where that is asked.
        """
        if self.runner.consumed:
            raise UsageError(
                "The step consumes its gradients in the backward: there are none to clip. Plan without "
                "states.in_backward."
            )
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        norm = self.runner.gradient_norm(gradients, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {float(norm)}: they are not clipped."
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
        return norm

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write plan.json, whole or not at all; `effcompile.optimize(model, plan=...)` applies it again.

        Raises:
            UsageError: the folder cannot be written.
        """
        return save_alone(self.plan, directory)


def planned(
    model: nn.Module, runner: StepRunner, plan: Plan, optimizer: Optimizer | None = None
) -> TrainingExecutable:
    """The model with the planned step as its forward; the given model stays as it is.

    Raises:
        UsageError: the model is planned already.
    """
    kind = type(model)
    if isinstance(model, TrainingExecutable):
        raise UsageError("This model is planned already. Give effcompile.optimize the original model.")
    given, before = _Given(model), vars(model).get("forward")

    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Outputs:
        """The given model's forward as it is now: one that was set on it, on its class, or by another
        class.
        """
        set_on_it = vars(model).get("forward")
        if set_on_it is not None and set_on_it is not before:
            return set_on_it(*args, **kwargs)
        there = self if type(model) is kind else unplanned(self)
        return type(model).forward(there, *args, **kwargs)

    @functools.wraps(kind.forward)
    def forward(self: TrainingExecutable, *args: Any, **kwargs: Any) -> Outputs:
        given.follow(self)
        if not (self.training and _differentiates()):
            return _unplanned(self, own, args, kwargs)
        try:
            return self.runner(args, kwargs)
        except GuardError as error:
            return self._refuse(error, args, kwargs)

    def unplanned(self: nn.Module) -> nn.Module:
        """The same model, with all that it holds, in its own class: its forward is the model's own."""
        twin = object.__new__(type(model))
        twin.__dict__ = self.__dict__
        return twin

    result = copy.copy(model)
    notes = runner.state.settle()
    beside: dict[str, object] = {
        "runner": runner, "plan": plan.with_changes(notes=(*plan.notes, *notes)), "optimizer": optimizer,
        "_effcompile_fallback": None, "_effcompile_offers": (),
    }  # fmt: skip
    if hasattr(model, "config"):
        # whether HuggingFace's Trainer gives it num_items_in_batch
        beside["accepts_loss_kwargs"] = runner.takes_items
    members = {"forward": forward, "own_forward": own, "unplanned": unplanned, "__module__": kind.__module__}
    members |= {name: _Beside(name, value) for name, value in beside.items()}
    result.__class__ = type(kind.__name__, (TrainingExecutable, kind), members)
    runner.state, runner.guarded = runner.state.bound_to(model, result), True
    if plan.goal.memory is not None and plan.predicted.peak_bytes is not None:
        runner.room = plan.goal.memory - plan.predicted.peak_bytes + runner.step.copied_bytes
    assert isinstance(result, TrainingExecutable)
    return result


class _Beside:
    """What a planned model has beside the model's own attributes: with its class, of which it is the one
    instance.

    So the model in its own class, which shares all attributes, is copied and pickled as it always was.
    """

    def __init__(self, name: str, value: object) -> None:
        self._name, self._value = name, value

    def __get__(self, instance: object, owner: type) -> Any:
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        self._value = value

    def __delete__(self, instance: object) -> Never:
        raise AttributeError(f"{self._name} of a planned model is not deleted.")


class _Given:
    """The model that was given, whose attributes the planned one shares: those that are set on it later are
    handed on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held, self._known = vars(model), dict(vars(model))

    def follow(self, planned: nn.Module) -> None:
        held, known = self._held, self._known
        if len(held) == len(known) and all(map(is_, held.values(), known.values())):
            return
        missing = object()
        changed = {
            key: value
            for key, value in held.items()
            if key != "training" and known.get(key, missing) is not value
        }
        _set(planned, changed)
        for key in known.keys() - held.keys():
            planned.__dict__.pop(key, None)
        self._known = dict(held)


def _differentiates() -> bool:
    """Within inference_mode nothing is recorded, enable_grad or not."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _unplanned(model: TrainingExecutable, own: Forward, args: Args, kwargs: Kwargs) -> Outputs:
    """What the model's own forward returns; of one whose parameters are sharded, on all ranks together."""
    with model.runner.whole(model):
        return own(model, *args, **kwargs)


def _set(module: nn.Module, attributes: Mapping[str, object]) -> None:
    """Past nn.Module.__setattr__, so that nothing is registered as a parameter or child."""
    module.__dict__.update(attributes)
