"""The Python entry points: optimize (function and decorator), plan, frontier."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile import compiler
from effcompile.compiler import Executable
from effcompile.dynamo import dynamo_backend
from effcompile.errors import InputsError, UsageError
from effcompile.goal import Goal
from effcompile.loader import Inputs, as_inputs
from effcompile.plan import Plan
from effcompile.target import Target

__all__ = ["Deferred", "Executable", "dynamo_backend", "frontier", "optimize", "plan"]

_TRAINING = (
    "Training is not built yet: this release plans and lowers inference (mode='inference'). Planned memory for a training step "
    "comes in the next one; until then use torch.utils.checkpoint or torch.compile."
)
#: Shapes that one Deferred is optimized for; calls of further shapes run the original model.
_MOST_SHAPES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that `compiler.optimize` needs but the model and its inputs."""

    goal: Goal
    target: str | Target = "auto"
    backend: str | None = None
    plan: Plan | None = None
    passes: Sequence[str] | None = None
    dynamic: bool | Mapping[str, Any] | None = None
    calibration: tuple[Inputs, ...] | None = None

    def carry_out(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable:
        """Capture, plan, lower and verify the model at these inputs."""
        return compiler.optimize(
            model,
            args,
            kwargs,
            goal=self.goal,
            target=self.target,
            backend=self.backend,
            plan=self.plan,
            passes=self.passes,
            dynamic=self.dynamic,
            calibration=self.calibration,
        )


def optimize(
    model: Any = None,
    *,
    inputs: Any = None,
    goal: Goal | Mapping[str, Any] | None = None,
    target: str | Target = "auto",
    backend: str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    optimizer: Any = None,
    passes: Sequence[str] | None = None,
    dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    **goal_fields: Any,
) -> Any:
    """Turn a model into one that meets the goal, verified against the original.

    Call it with a model, or use it as a decorator: on a function of tensors, on a `forward` method, or on an
    nn.Module class (which then makes optimized instances). Without `inputs` the work is done at the first call.

    Args:
        model: an nn.Module, a function of tensors, or an nn.Module class. None: return a decorator.
        inputs: example inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        goal: the goal; `goal_fields` change it.
        target: a machine's name or .toml file, or a Target; "auto" is this machine.
        backend: one backend's name; None compares all that are installed.
        plan: a Plan or the path of a plan.json to apply again, without solving.
        optimizer: for training, which this release does not build.
        passes: the passes to use, e.g. ["quantize.group_size=64"]; None uses all.
        dynamic: True to keep batch and sequence free, False to fix all shapes, or torch.export's dynamic shapes.
        calibration: inputs on which errors are measured; None generates some.
        **goal_fields: max_error=0.01, memory="6GiB", minimize="memory", reads="last".

    Returns:
        An Executable, or (without inputs) a Deferred, which makes Executables when it is called.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
        VerificationError: the result is not within the declared error.
    """
    loaded = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    request = Request(
        goal=declare(goal, optimizer, goal_fields) if loaded is None else goal_of_plan(loaded, goal, goal_fields, backend),
        target=target,
        backend=backend,
        plan=loaded,
        passes=passes,
        dynamic=dynamic,
        calibration=_calibration(calibration),
    )
    return functools.partial(_optimize, request=request) if model is None else _optimize(model, inputs, request=request)


def plan(
    model: Any,
    inputs: Any,
    *,
    goal: Goal | Mapping[str, Any] | None = None,
    target: str | Target = "auto",
    backend: str | None = None,
    passes: Sequence[str] | None = None,
    dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    **goal_fields: Any,
) -> Plan:
    """Decide without lowering; works for machines that are not here (target="h100-sxm"). Arguments as in `optimize`.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
    """
    args, kwargs = as_inputs(inputs)
    return compiler.make_plan(
        as_module(model),
        args,
        kwargs,
        goal=declare(goal, None, goal_fields),
        target=target,
        backend=backend,
        passes=passes,
        dynamic=dynamic,
        calibration=_calibration(calibration),
    )


def frontier(
    model: Any,
    inputs: Any,
    *,
    points: int = 8,
    goal: Goal | Mapping[str, Any] | None = None,
    target: str | Target = "auto",
    backend: str | None = None,
    passes: Sequence[str] | None = None,
    dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    **goal_fields: Any,
) -> list[Plan]:
    """At most `points` predicted plans of the best backend along its memory-time front, least memory first.

    The other arguments are those of `plan`.

    Raises:
        UsageError: something in the request is wrong. InfeasibleError: no plan meets the goal.
    """
    if points < 1:
        raise UsageError(f"points = {points} must be at least 1.")
    args, kwargs = as_inputs(inputs)
    return compiler.frontier(
        as_module(model),
        args,
        kwargs,
        points=points,
        goal=declare(goal, None, goal_fields),
        target=target,
        backend=backend,
        passes=passes,
        dynamic=dynamic,
        calibration=_calibration(calibration),
    )


def as_module(model: Any) -> nn.Module:
    """The model itself, or a module around a function, with the modules that the function uses as its children.

    Raises:
        UsageError: neither an nn.Module nor a function.
    """
    if isinstance(model, Deferred):
        return model.model
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module):
        return _with_forward(model.__self__, model.__func__)
    if not isinstance(model, types.FunctionType):
        raise UsageError(f"model is a {type(model).__name__}. Give an nn.Module or a function of tensors.")
    module: nn.Module = type(model.__name__, (nn.Module,), {"__doc__": model.__doc__})()
    for name, child in _modules_used(model):
        module.add_module(name, child)
    module.training = any(child.training for child in module.children())
    module.forward = model
    return module


def _modules_used(function: types.FunctionType) -> Iterator[tuple[str, nn.Module]]:
    """The modules among the function's closure and the globals that it names, each once, under their variable's name."""
    variables = inspect.getclosurevars(inspect.unwrap(function))
    seen: set[int] = set()
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _with_forward(instance: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of a module (same parameters) that computes another forward."""
    clone = copy.copy(instance)
    clone.__dict__["forward"] = types.MethodType(forward, clone)
    return clone


class Deferred(nn.Module):
    """A model that is optimized at its first call, and again for inputs of shapes that it was not built for.

    Parameters, buffers and state_dict are the original model's. After new weights (load_state_dict, to, half ...)
    it is optimized again. After train() the original runs, with a warning, as the lowered model has no gradients.
    """

    def __init__(self, model: nn.Module, request: Request) -> None:
        super().__init__()
        # past nn.Module.__setattr__: `model` must not become a child, whose names would be those of the state_dict
        self.__dict__.update(model=model, request=request, executables={}, bound=WeakKeyDictionary(), warned=set())
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self._run_original("it is in training mode (call .eval())", args, kwargs)
        found = self.executables.setdefault(_structure(args, kwargs), [])
        for executable in reversed(found):
            try:
                result = executable(*args, **kwargs)
            except InputsError:  # made for other shapes
                continue
            self.__dict__["latest"] = executable
            return result
        if len(found) >= _MOST_SHAPES:
            return self._run_original(f"it was already optimized for {_MOST_SHAPES} shapes (ask for dynamic=True)", args, kwargs)
        self.__dict__["latest"] = self.request.carry_out(self.model, args, kwargs)
        found.append(self.latest)
        return self.latest(*args, **kwargs)

    def _run_original(self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"effcompile runs the original {type(self.model).__name__}: {reason}", stacklevel=4)
        return self.model(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            UsageError: nothing was called yet.
        """
        self._require_call()
        found: Plan = self.latest.plan
        return found

    def report(self, console: Any = None, verbose: bool = False) -> None:
        """Print the plan of the latest call."""
        self.plan.report(console, verbose=verbose)

    def save(self, directory: str | os.PathLike[str]) -> Any:
        """Write plan.json and the artifact of the latest call.

        Raises:
            UsageError: nothing was called yet, or the folder cannot be written.
        """
        self._require_call()
        return self.latest.save(directory)

    def _require_call(self) -> None:
        if "latest" not in self.__dict__:
            raise UsageError("There is no plan yet: it is made at the first call. Call the model, or give `inputs` to effcompile.optimize.")

    def __get__(self, instance: object, owner: type | None = None) -> Deferred:
        """A decorated `forward` becomes a method: one Deferred per instance of the class."""
        if not isinstance(instance, nn.Module):
            return self
        if instance not in self.bound:
            self.bound[instance] = Deferred(_with_forward(instance, self.model.forward), self.request)
        mine: Deferred = self.bound[instance]
        mine.training = instance.training
        return mine

    def __getattr__(self, name: str) -> Any:
        """What the original model has: `model.config`, its children ..."""
        if "model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.model, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.executables.clear()
        return self.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Deferred:
        self.training = mode
        self.model.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Deferred:
        self.executables.clear()
        self.model._apply(fn, recurse)
        return self


def _structure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an Executable takes as given: the structure of its inputs, and all that is not a tensor."""
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return (*(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves), repr(spec))


def _optimize(model: Any, inputs: Any = None, *, request: Request) -> Any:
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _factory(model, request)
    module = as_module(model)
    if inputs is None:
        return Deferred(module, request)
    return request.carry_out(module, *as_inputs(inputs))


def _factory(model_class: type[nn.Module], request: Request) -> Callable[..., Deferred]:
    """What a decorated class becomes: a function that makes optimized instances."""

    @functools.wraps(model_class, updated=())
    def make(*args: Any, **kwargs: Any) -> Deferred:
        return Deferred(model_class(*args, **kwargs), request)

    return make


def declare(goal: Goal | Mapping[str, Any] | None, optimizer: Any, changes: Mapping[str, Any]) -> Goal:
    """The goal with its changes; a dict of goal fields will do for a goal.

    Raises:
        UsageError: a training goal, or a value that is not allowed.
    """
    base = Goal.of(**goal) if isinstance(goal, Mapping) else goal
    declared = Goal.of(base, **changes)
    if declared.mode == "training" or optimizer is not None:
        raise UsageError(_TRAINING)
    return declared


def goal_of_plan(plan: Plan, goal: Goal | Mapping[str, Any] | None, changes: Mapping[str, Any], backend: str | None) -> Goal:
    """The goal that a saved plan was made for; nothing else can be asked of it.

    Raises:
        UsageError: another goal or backend than the plan's.
    """
    if declare(plan.goal if goal is None else goal, None, changes) != plan.goal:
        raise UsageError(f"The plan was made for another goal: {plan.goal.describe()}. Leave the goal out, or plan again without it.")
    if backend is not None and backend != plan.backend:
        raise UsageError(f"The plan is for the backend {plan.backend!r}, not {backend!r}. Leave the backend out, or plan again without it.")
    return plan.goal


def _calibration(given: Iterable[Any] | None) -> tuple[Inputs, ...] | None:
    """Calibration inputs taken apart, each given like `inputs`."""
    return None if given is None else tuple(as_inputs(one, f"calibration[{i}]") for i, one in enumerate(given))
