"""A request, and the model that carries it out at its first call with inputs, and again for other shapes."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.backends.torch.items import with_items_as_tensor
from effcompile.compiler import Request, TrainingExecutable
from effcompile.core.autocast import autocasts
from effcompile.core.errors import GuardError, InputsError, UsageError
from effcompile.core.trees import leaves_with_path
from effcompile.core.types import Args, Forward, Kwargs, Outputs
from effcompile.ir.plan import Plan
from effcompile.modes import PLANNING, Planned, carry_out
from effcompile.runtime.planned import SetOnModel, past_the_plan

if TYPE_CHECKING:
    from rich.console import Console

#: Shapes that one Deferred is optimized for; calls of further shapes run the original model.
_MOST_SHAPES = 8

#: How often one Deferred is planned again because the model was changed.
_MOST_REPLANS = 16


def with_forward(instance: nn.Module, forward: Forward) -> nn.Module:
    """The module under a class that computes another forward: it has the same attributes, also those that are
    set later.
    """
    clone = copy.copy(instance)
    if "forward" in clone.__dict__:
        del clone.__dict__["forward"]
    else:
        clone.__dict__ = instance.__dict__
    clone.__class__ = type(type(instance).__name__, (type(instance),), {"forward": forward})
    return clone


class _PassesForItsModel:
    """`isinstance` takes a model whose step is planned for the model: Trainer saves a PreTrainedModel with
    its config and tied weights.

    A class of its own: in one that calls `super()` Python keeps `__class__` for itself.
    """

    @property  # type: ignore[misc]  # it cannot be set
    def __class__(self) -> type:
        held = self.__dict__
        return type(held["model"]) if "request" in held and held["request"].training else type(self)


class Deferred(_PassesForItsModel, SetOnModel):
    """A model that is optimized at its first call, and again for inputs of shapes that it was not built for.

    Parameters, buffers, children and state_dict are the original model's. In inference it is optimized again
    after new weights (load_state_dict, to, half ...), and after train() the original runs, with a warning, as
    the lowered model has no gradients. In training the planned step runs in training mode with gradients
    enabled, the model itself otherwise. A model that was changed otherwise is planned again, too, unless the
    request's `on_change` says what else to do. Threads that call it before its plan is made wait for the one
    that makes it.
    """

    def __init__(self, model: nn.Module, request: Request) -> None:
        super().__init__()
        # past nn.Module.__setattr__: `model` must not become a child, whose names would be those of the
        # state_dict. Its own children and parameters are ours: whoever walks the tree (Trainer's weight
        # decay) finds them.
        self.__dict__.update(
            model=model,
            request=request,
            executables={},
            bound=WeakKeyDictionary(),
            warned=set(),
            retired=0,
            given_up="",
        )
        self.__dict__["left_out"] = None
        self.__dict__.update(_parameters=model._parameters, _buffers=model._buffers, _modules=model._modules)
        self.training = request.training and model.training
        if request.training:
            self.__dict__["forward"] = self._training_forward()

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        if self.training:
            return self._run_original("it is in training mode (call .eval())", args, kwargs)
        found = self.executables.setdefault(_structure(args, kwargs), [])
        fitting = self._run_fitting(found, args, kwargs)
        if fitting:
            return fitting[0]
        if self.given_up:
            return self._run_original(self.given_up, args, kwargs)
        with PLANNING:
            # another thread may have planned it in the meantime
            fitting = self._run_fitting(found, args, kwargs)
            if fitting:
                return fitting[0]
            if len(found) < _MOST_SHAPES:
                self.__dict__["latest"] = carry_out(self.request, self.model, args, kwargs)
                found.append(self.latest)
                return self.latest(*args, **kwargs)
        return self._run_original(
            f"it was already optimized for {_MOST_SHAPES} shapes (ask for dynamic=True)", args, kwargs
        )

    def _run_fitting(self, found: list[Planned], args: Args, kwargs: Kwargs) -> tuple[Outputs, ...]:
        """(What the latest of those that take these shapes returns,); nothing where none does."""
        for executable in reversed(found):
            try:
                result = executable(*args, **kwargs)
            except GuardError as error:  # made for other shapes, or for a model that is no more
                if error.of_model:
                    self._retire(found, executable, error)
                continue
            except InputsError:
                continue
            self.__dict__["latest"] = executable
            return (result,)
        return ()

    def _training_forward(self) -> Forward:
        """What a call runs in training, with the signature of the model's forward (Trainer reads it)."""

        @functools.wraps(self.model.forward)
        def forward(*args: object, **kwargs: object) -> Outputs:
            return (
                self._train_step(args, kwargs)
                if self.training and torch.is_grad_enabled()
                else self.model(*args, **kwargs)
            )

        return forward

    def _train_step(self, args: Args, kwargs: Kwargs) -> Outputs:
        """The step as planned for these shapes; planned now where they are new."""
        kwargs = with_items_as_tensor(kwargs)
        key = (
            _structure(args, kwargs),
            shapes := _shapes(args, kwargs),
            _differentiated(args, kwargs),
            autocasts(),
        )
        if key not in self.executables:
            with PLANNING:
                if key not in self.executables and len(self.executables) < _MOST_SHAPES:
                    # another thread may have planned it
                    self.executables[key] = self._plan_step(shapes, args, kwargs)
        if key not in self.executables:
            reason = (
                f"its step was already planned for {_MOST_SHAPES} shapes, and {shapes} is one more "
                "(pad the batches to fewer shapes)"
            )
            return self._run_original(reason, args, kwargs)
        self.__dict__["latest"] = self.executables[key]
        try:
            return self.latest(*args, **kwargs)
        except GuardError as error:
            return self._step_again(key, error, args, kwargs)

    def _step_again(self, key: Hashable, error: GuardError, args: Args, kwargs: Kwargs) -> Outputs:
        """The step planned anew, for the model is another one."""
        self._retire([], self.executables[key], error)
        if self.given_up:
            return self._run_original(self.given_up, args, kwargs)
        warnings.warn(
            f"effcompile plans the step of {type(self.model).__name__} again: {error}", stacklevel=7
        )
        with PLANNING:
            self.executables[key] = self._planned(self.request.anew, args, kwargs)
        self.__dict__["latest"] = self.executables[key]
        return self.latest(*args, **kwargs)

    def _retire(self, found: list[Planned], executable: Planned, error: GuardError) -> None:
        """Drop what was made of the model as it was, where planning again is what is to be done.

        Raises:
            GuardError: it is not (`on_change="error"`).
        """
        how = self.request.on_change or "replan"
        if how == "error":
            raise error
        with contextlib.suppress(ValueError):  # another thread was first
            found.remove(executable)
        self.__dict__["retired"] += 1
        if how == "eager":
            self.__dict__["given_up"] = str(error)
        elif self.retired > _MOST_REPLANS:
            self.__dict__["given_up"] = (
                f"it was planned again {_MOST_REPLANS} times, and has changed once more: {error}"
            )

    def _plan_step(self, shapes: str, args: Args, kwargs: Kwargs) -> Planned:
        """The step, planned; a saved plan is for the first shapes only."""
        if not self.executables:
            return self._planned(self.request, args, kwargs)
        said = (
            f"effcompile plans the step of {type(self.model).__name__} again, under the same goal, for "
            f"the shapes {shapes}"
        )
        warnings.warn(said, stacklevel=7)
        return self._planned(self.request.anew, args, kwargs)

    def _planned(self, request: Request, args: Args, kwargs: Kwargs) -> Planned:
        """With all that the model returns, where it returns what it did not at first
        (`output_hidden_states=True`).
        """
        made = carry_out(request, self.model, args, kwargs)
        if self.left_out is None:
            self.__dict__["left_out"] = left_out(made)
        if left_out(made) <= self.left_out:
            return made
        return carry_out(replace(request.anew, keep_outputs=True), self.model, args, kwargs)

    def _run_original(self, reason: str, args: Args, kwargs: Kwargs) -> Outputs:
        self._say_original(reason, stacklevel=5)
        return self.model(*args, **kwargs)

    def _say_original(self, reason: str, stacklevel: int) -> None:
        """Say once that the original runs, and why."""
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(
                f"effcompile runs the original {type(self.model).__name__}: {reason}", stacklevel=stacklevel
            )

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            UsageError: nothing was called yet.
        """
        self._require_call()
        found: Plan = self.latest.plan
        return found

    def report(self, console: Console | None = None, verbose: bool = False) -> None:
        """Print the plan of the latest call."""
        self.plan.report(console, verbose=verbose)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write plan.json and the artifact of the latest call.

        Raises:
            UsageError: nothing was called yet, or the folder cannot be written.
        """
        self._require_call()
        return self.latest.save(directory)

    def _require_call(self) -> None:
        if "latest" not in self.__dict__:
            raise UsageError(
                "There is no plan yet: it is made at the first call. Call the model, or give `inputs` to "
                "effcompile.optimize."
            )

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

    def __copy__(self) -> Deferred:
        return self._of(self.model)

    def __deepcopy__(self, memo: dict[int, object]) -> Deferred:
        """A copy that is planned anew: the steps of this one compute with this one's parameters."""
        memo[id(self)] = twin = self._of(copy.deepcopy(self.model, memo))
        return twin

    def _of(self, model: nn.Module) -> Deferred:
        twin = Deferred(model, self.request)
        twin.training = self.training
        return twin

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            f"An optimized {type(self.model).__name__} cannot be pickled, for its plan is bound to this "
            "process. Save its state_dict(), and call effcompile.optimize again where it is loaded."
        )

    def __getattr__(self, name: str) -> Any:
        """What the original model has: `model.config`, its children ..."""
        if "model" not in self.__dict__:
            raise AttributeError(name)
        found = getattr(self.model, name)
        why = past_the_plan(name)
        return self._saying(found, why) if why and callable(found) else found

    def _saying(self, method: Forward, why: str) -> Forward:
        """A method of the original, which says so: it calls the original, and not this module."""

        @functools.wraps(method)
        def said(*args: object, **kwargs: object) -> Outputs:
            self._say_original(why, stacklevel=3)
            return method(*args, **kwargs)

        return said

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: object, **kwargs: object) -> Any:
        if not self.request.training:  # a planned step reads the parameters at each call
            self.executables.clear()
        return self.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Deferred:
        self.training = mode
        self.model.train(mode)
        return self

    def _apply(self, fn: Forward, recurse: bool = True) -> Deferred:
        self.executables.clear()
        self.model._apply(fn, recurse)
        return self


def left_out(planned: Planned) -> frozenset[str]:
    """The fields of what the model returns that its step does not; none in inference, which returns all."""
    steps = planned.runner.steps if isinstance(planned, TrainingExecutable) else ()
    return frozenset(name.split(".")[0] for step in steps for name in step.dropped)


def _structure(args: Args, kwargs: Kwargs) -> tuple[str | None, ...]:
    """What an Executable takes as given: the structure of its inputs, and all that is not a tensor."""
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return (*(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves), repr(spec))


def _differentiated(args: Args, kwargs: Kwargs) -> tuple[bool, ...]:
    """Which inputs require a gradient."""
    leaves = pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
    return tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _shapes(args: Args, kwargs: Kwargs) -> str:
    """Shapes and dtypes of the tensors among the inputs, as text: `input_ids 2×512 int64, labels 2×512
    int64`.
    """
    leaves = leaves_with_path((args, dict(sorted(kwargs.items()))))
    texts = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(str(key.key) for key in path[1:] if isinstance(key, pytree.MappingKey))
            shape = "×".join(map(str, leaf.shape)) or "scalar"
            texts.append(f"{name} {shape} {str(leaf.dtype).removeprefix('torch.')}".strip())
    return ", ".join(texts)
