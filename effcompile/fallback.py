"""What an executable does in the place of a call that its plan does not hold for."""

from __future__ import annotations

import functools
import warnings

from torch import nn

from effcompile.capture.mends import evaluating
from effcompile.compiler import Request, TrainingExecutable
from effcompile.core.errors import AutocastError, GuardError
from effcompile.core.types import Args, Forward, Kwargs, Outputs
from effcompile.deferred import Deferred, left_out
from effcompile.modes import Planned


class _Eager:
    """Runs the model's own forward in the place of refused calls, with one warning."""

    def __init__(self, name: str, run: Forward) -> None:
        self._name, self._run, self._warned = name, run, False

    def __call__(self, error: GuardError, args: Args, kwargs: Kwargs) -> Outputs:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"effcompile runs the original {self._name}, whose plan does not hold for this call: {error}",
                stacklevel=5,
            )
        return self._run(*args, **kwargs)


class _Replanned:
    """Answers refused calls by planning again; the executable shows the plan of the latest."""

    def __init__(self, executable: Planned, model: nn.Module, request: Request) -> None:
        self._executable, self._deferred = executable, Deferred(model, request.anew)
        self._deferred.__dict__["left_out"] = left_out(executable)

    def offering(self, error: GuardError) -> GuardError:
        """The error that the executable raises by itself."""
        return self._executable._offering(error)

    def __call__(self, error: GuardError, args: Args, kwargs: Kwargs) -> Outputs:
        if self._deferred.request.training and (
            self._deferred.model._forward_hooks or self._deferred.model._forward_pre_hooks
        ):
            raise error  # the outermost module's hooks would run twice
        self._deferred.training = self._executable.training
        result = self._deferred.forward(*args, **kwargs)
        if "latest" in self._deferred.__dict__:
            self._executable.plan = self._deferred.plan
        return result


class _UnderAutocast:
    """Answers a step's calls within another torch.autocast by planning it there, too; what else was refused
    stays so.
    """

    def __init__(self, replanned: _Replanned, name: str) -> None:
        self._replanned, self._name, self._warned = replanned, name, False

    def __call__(self, error: GuardError, args: Args, kwargs: Kwargs) -> Outputs:
        if not isinstance(error, AutocastError):
            raise self._replanned.offering(error)
        if not self._warned:
            self._warned = True
            said = (
                "within the torch.autocast that it is called in, which is another one than it was planned in"
            )
            warnings.warn(
                f"effcompile plans the step of {self._name} again, under the same goal, {said}", stacklevel=5
            )
        return self._replanned(error, args, kwargs)


def answering(executable: Planned, request: Request) -> Planned:
    """The executable with what it does in the place of a call that its plan does not hold for."""
    how = request.on_change or "error"
    executable._effcompile_offers = request.offers
    if how != "error":
        model = executable.unplanned()
        run = (
            functools.partial(type(executable).own_forward, model)
            if isinstance(executable, TrainingExecutable)
            else functools.partial(_run_evaluating, model)
        )
        fallback = (
            _Eager(type(model).__name__, run) if how == "eager" else _Replanned(executable, model, request)
        )
        executable._effcompile_fallback = fallback
    elif (
        isinstance(executable, TrainingExecutable)
        and request.on_change is None
        and request.optimizer is None
        and request.mesh is None
    ):
        model = executable.unplanned()
        elsewhere = _UnderAutocast(_Replanned(executable, model, request), type(model).__name__)
        executable._effcompile_fallback = elsewhere
    return executable


def _run_evaluating(model: nn.Module, *args: object, **kwargs: object) -> Outputs:
    """The model's own forward in evaluation mode; modules that are in training mode inside a model that is
    not stay so.
    """
    if not model.training:
        return model(*args, **kwargs)
    with evaluating(model):
        return model(*args, **kwargs)
