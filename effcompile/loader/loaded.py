"""A model that was read, with its example inputs, whatever it was read from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.core.errors import CaptureError, InputsError
from effcompile.core.reasons import Reason
from effcompile.core.types import Inputs, Kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model and what was given with it.

    Attributes:
        path: the file or folder; `name`: the attribute of a Python file, or the class, that the model came
            from.
        args, kwargs: the example inputs.
        calibration: inputs for measuring sensitivities and activation ranges, each as (args, kwargs); () when
            not given.
        loss: `loss(outputs, inputs)` or None. optimizer: one of the model's parameters,
            `optimizer(parameters)`, or None.
        stages: of a run, as written in the file, () for none. inputs_at: a stage → its example inputs.
        goal: a Goal or a mapping of its fields, as written in the file, or None.
        notes: what was done that the user did not write, for the report.
        told: of inputs that were derived, what they are and how to give others; '' of the user's own.
    """

    path: Path
    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Kwargs
    calibration: tuple[Inputs, ...] = ()
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | Callable[..., Any] | None = None
    stages: tuple[Any, ...] = ()
    inputs_at: Callable[[Any], Any] | None = None
    goal: Any = None
    notes: tuple[Reason, ...] = ()
    told: str = ""

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An error that the model meets at inputs of our making says that they are, and which."""
        try:
            yield
        except (InputsError, CaptureError) as error:
            if self.told and self.told not in str(error):
                error.args = (f"{error}\n  {self.told}", *error.args[1:])
            raise


def as_inputs(value: object, what: str = "inputs") -> Inputs:
    """(args, kwargs) from a mapping (keywords), a tuple or list (positions), or one tensor.

    Raises:
        InputsError: anything else, or nothing.
    """
    if isinstance(value, Mapping) and value:
        return (), {str(key): item for key, item in value.items()}
    if isinstance(value, (tuple, list)) and len(value):
        return tuple(value), {}
    if isinstance(value, torch.Tensor):
        return (value,), {}
    raise InputsError(
        f"{what}: {a(value)} is not usable. Give a dict of keyword arguments, a tuple of positional ones, "
        "or one tensor."
    )


def a(value: object) -> str:
    """A value's type as a phrase: `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
