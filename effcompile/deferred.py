"""A request, and the model that carries it out at its first call with inputs, and again for other shapes."""

from __future__ import annotations

import copy
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile import compiler
from effcompile.backends.torch.items import with_items_as_tensor
from effcompile.compiler import Executable, TrainingExecutable
from effcompile.core.errors import InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.loader import Inputs
from effcompile.machine.target import Target

#: Shapes that one Deferred is optimized for; calls of further shapes run the original model.
_MOST_SHAPES = 8

#: Held while a model is captured, planned and verified: torch traces one model at a time, and timings want the machine for themselves.
PLANNING = threading.RLock()
# A process that is forked meanwhile would wait for ever for a thread that it does not have.
os.register_at_fork(before=PLANNING.acquire, after_in_parent=PLANNING.release, after_in_child=PLANNING.release)

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that the compiler needs but the model and its inputs.

    Raises:
        UsageError: something that the goal's mode does not have.
    """

    goal: Goal
    target: str | Target = "auto"
    backend: str | None = None
    plan: Plan | None = None
    passes: Sequence[str] | None = None
    dynamic: bool | Mapping[str, Any] | None = None
    calibration: tuple[Inputs, ...] | None = None
    loss: Loss | None = None
    keep_outputs: bool = False
    optimizer: Any = None
    progress: compiler.Progress = compiler.QUIET

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise UsageError(f"loss is a {type(self.loss).__name__}. Give a function: loss(outputs, inputs) returns a scalar tensor.")
        if self.training and self.dynamic:
            raise UsageError("A training plan holds for one batch shape: leave dynamic out. Without `inputs` each shape is planned.")
        if self.training and self.calibration is not None:
            raise UsageError("calibration measures errors, and a training plan makes none: leave it out.")
        given = {"keep_outputs": self.keep_outputs, "loss": self.loss is not None, "optimizer": self.optimizer is not None}
        if not self.training and any(given.values()):
            name = next(name for name, value in given.items() if value)
            raise UsageError(f"{name} is for a training step. Leave it out, or ask for mode='training'.")

    @property
    def training(self) -> bool:
        return self.goal.mode == "training"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every entry of the compiler takes in this mode."""
        common = {"goal": self.goal, "target": self.target, "passes": self.passes, "progress": self.progress}
        if self.training:
            return {**common, "loss": self.loss, "keep_outputs": self.keep_outputs, "optimizer": self.optimizer}
        return {**common, "backend": self.backend, "dynamic": self.dynamic, "calibration": self.calibration}

    def carry_out(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable | TrainingExecutable:
        """Capture, plan, lower and verify the model at these inputs. One thread at a time: others wait."""
        with PLANNING:
            if self.training:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # the steps that it runs draw dropout, too
                    return compiler.optimize_training(model, args, kwargs, backend=self.backend, plan=self.plan, **self.options)
            return compiler.optimize(model, args, kwargs, plan=self.plan, **self.options)

    def make_plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Decide at these inputs; nothing is lowered."""
        with PLANNING:
            return (compiler.plan_training if self.training else compiler.make_plan)(model, args, kwargs, **self.options)

    def make_frontier(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], points: int | None) -> list[Plan]:
        """Plans along the memory-time front; None for as many as the mode usually has."""
        options = self.options if points is None else {**self.options, "points": points}
        with PLANNING:
            return (compiler.frontier_training if self.training else compiler.frontier)(model, args, kwargs, **options)


def with_forward(instance: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of a module (same parameters) whose class computes another forward."""
    clone = copy.copy(instance)
    clone.__dict__.pop("forward", None)
    clone.__class__ = type(type(instance).__name__, (type(instance),), {"forward": forward})
    return clone


class Deferred(nn.Module):
    """A model that is optimized at its first call, and again for inputs of shapes that it was not built for.

    Parameters, buffers, children and state_dict are the original model's. In inference it is optimized again after new
    weights (load_state_dict, to, half ...), and after train() the original runs, with a warning, as the lowered model has
    no gradients. In training the planned step runs in training mode with gradients enabled, the model itself otherwise.
    Threads that call it before its plan is made wait for the one that makes it.
    """

    def __init__(self, model: nn.Module, request: Request) -> None:
        super().__init__()
        # past nn.Module.__setattr__: `model` must not become a child, whose names would be those of the state_dict.
        # Its own children and parameters are ours: whoever walks the tree (Trainer's weight decay) finds them.
        self.__dict__.update(model=model, request=request, executables={}, bound=WeakKeyDictionary(), warned=set())
        self.__dict__.update(_parameters=model._parameters, _buffers=model._buffers, _modules=model._modules)
        self.training = request.training and model.training
        if request.training:
            self.__dict__["forward"] = self._training_forward()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self._run_original("it is in training mode (call .eval())", args, kwargs)
        found = self.executables.setdefault(_structure(args, kwargs), [])
        fitting = self._run_fitting(found, args, kwargs)
        if fitting:
            return fitting[0]
        with PLANNING:
            fitting = self._run_fitting(found, args, kwargs)  # another thread may have planned it in the meantime
            if fitting:
                return fitting[0]
            if len(found) < _MOST_SHAPES:
                self.__dict__["latest"] = self.request.carry_out(self.model, args, kwargs)
                found.append(self.latest)
                return self.latest(*args, **kwargs)
        return self._run_original(f"it was already optimized for {_MOST_SHAPES} shapes (ask for dynamic=True)", args, kwargs)

    def _run_fitting(self, found: Sequence[Executable], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """(What the latest of those that take these shapes returns,); nothing where none does."""
        for executable in reversed(found):
            try:
                result = executable(*args, **kwargs)
            except InputsError:  # made for other shapes
                continue
            self.__dict__["latest"] = executable
            return (result,)
        return ()

    def _training_forward(self) -> Callable[..., Any]:
        """What a call runs in training, with the signature of the model's forward (Trainer reads it)."""

        @functools.wraps(self.model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._train_step(args, kwargs) if self.training and torch.is_grad_enabled() else self.model(*args, **kwargs)

        return forward

    def _train_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The step as planned for these shapes; planned now where they are new."""
        kwargs = with_items_as_tensor(kwargs)
        key = (_structure(args, kwargs), shapes := _shapes(args, kwargs), _differentiated(args, kwargs))
        if key not in self.executables:
            with PLANNING:
                if key not in self.executables and len(self.executables) < _MOST_SHAPES:  # another thread may have planned it
                    self.executables[key] = self._plan_step(shapes, args, kwargs)
        if key not in self.executables:
            reason = f"its step was already planned for {_MOST_SHAPES} shapes, and {shapes} is one more (pad the batches to fewer shapes)"
            return self._run_original(reason, args, kwargs)
        self.__dict__["latest"] = self.executables[key]
        return self.latest(*args, **kwargs)

    def _plan_step(self, shapes: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable | TrainingExecutable:
        """The step, planned; a saved plan is for the first shapes only."""
        if not self.executables:
            return self.request.carry_out(self.model, args, kwargs)
        said = f"effcompile plans the step of {type(self.model).__name__} again, under the same goal, for the shapes {shapes}"
        warnings.warn(said, stacklevel=7)
        return replace(self.request, plan=None).carry_out(self.model, args, kwargs)

    def _run_original(self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._say_original(reason, stacklevel=5)
        return self.model(*args, **kwargs)

    def _say_original(self, reason: str, stacklevel: int) -> None:
        """Say once that the original runs, and why."""
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"effcompile runs the original {type(self.model).__name__}: {reason}", stacklevel=stacklevel)

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
        function = self.model.__dict__.get("function")
        if not isinstance(instance, nn.Module) or function is None:
            return self
        if instance not in self.bound:
            with PLANNING:
                if instance not in self.bound:
                    self.bound[instance] = Deferred(with_forward(instance, function), self.request)
        mine: Deferred = self.bound[instance]
        mine.training = instance.training
        return mine

    def __getattr__(self, name: str) -> Any:
        """What the original model has: `model.config`, its children ..."""
        if "model" not in self.__dict__:
            raise AttributeError(name)
        found = getattr(self.model, name)
        return self._saying(found) if name == "generate" and callable(found) else found

    def _saying(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """The original's generate(), which says so: it calls the original with a cache, and not this module."""

        @functools.wraps(generate)
        def said(*args: Any, **kwargs: Any) -> Any:
            self._say_original("generate() calls it token by token with a cache, for which nothing is planned", stacklevel=3)
            return generate(*args, **kwargs)

        return said

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not self.request.training:  # a planned step reads the parameters at each call
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


def _differentiated(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which inputs require a gradient."""
    leaves = pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
    return tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Shapes and dtypes of the tensors among the inputs, as text: `input_ids 2×512 int64, labels 2×512 int64`."""
    leaves = pytree.tree_leaves_with_path((args, dict(sorted(kwargs.items()))))
    texts = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(str(key.key) for key in path[1:] if isinstance(key, pytree.MappingKey))
            shape = "×".join(map(str, leaf.shape)) or "scalar"
            texts.append(f"{name} {shape} {str(leaf.dtype).removeprefix('torch.')}".strip())
    return ", ".join(texts)
