"""A function of tensors, or a method of a module, as a module of its own."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator

import torch
from torch import nn

from effcompile.core.errors import UsageError
from effcompile.core.types import Forward, Outputs
from effcompile.deferred import Deferred, with_forward


def as_module(model: object) -> nn.Module:
    """The model itself, or a module around a function, with the modules that the function uses as its
    children.

    Raises:
        UsageError: neither an nn.Module nor a function, or a module that cannot be read.
    """
    if isinstance(model, Deferred):
        return model.model
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        kind = type(model).__name__
        raise UsageError(
            f"The model is wrapped in {kind}, whose hooks a plan would not see. Write "
            f"{kind}(effcompile.optimize(model, ...))."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "The model is TorchScript (torch.jit.script or torch.jit.trace), whose code torch.export does "
            "not read. Give the nn.Module that it was made of."
        )
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module):
        return with_forward(model.__self__, model.__func__)
    if not isinstance(model, types.FunctionType):
        raise UsageError(f"model is a {type(model).__name__}. Give an nn.Module or a function of tensors.")
    module: nn.Module = type(
        model.__name__, (nn.Module,), {"__doc__": model.__doc__, "forward": _method(model)}
    )()
    for name, child in _modules_used(model):
        module.add_module(name, child)
    module.training = any(child.training for child in module.children())
    module.__dict__["function"] = model
    return module


def check_trained_by_calls(model: object) -> None:
    """Raises: UsageError: it has a `training_step` and its own optimizers, as a LightningModule, whose
    Trainer calls that instead of the model: what is planned would never run.
    """
    ways = (getattr(type(model), name, None) for name in ("training_step", "configure_optimizers"))
    if not isinstance(model, nn.Module) or not all(map(callable, ways)):
        return
    name = next(iter(model._modules), "network")
    raise UsageError(
        f"{type(model).__name__} has a training_step, which a Trainer calls, and which calls the network "
        f"past what is planned. Plan the network that is in it: `module.{name} = "
        f"effcompile.optimize(module.{name}, mode='training', ...)`."
    )


def _method(function: types.FunctionType) -> Forward:
    """The function as a method: `self` in front, otherwise its own signature."""

    @functools.wraps(function)
    def forward(_: nn.Module, *args: object, **kwargs: object) -> Outputs:
        return function(*args, **kwargs)

    own = inspect.signature(function)
    itself = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = own.replace(parameters=[itself, *own.parameters.values()])  # type: ignore[attr-defined]
    return forward


def _modules_used(function: types.FunctionType) -> Iterator[tuple[str, nn.Module]]:
    """The modules among the function's closure and the globals that it names, each once, under their
    variable's name.
    """
    variables = inspect.getclosurevars(inspect.unwrap(function))
    seen: set[int] = set()
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            yield name, value
