"""Reads a `model.py`: what it defines as `model`, `inputs`, `loss`, `optimizer`, `stages`, `calibration` and
`goal`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.core.errors import InputsError, UsageError
from effcompile.core.types import Inputs
from effcompile.loader.derive import Derived, derive
from effcompile.loader.loaded import Loaded, a, as_inputs
from effcompile.loader.source import ModelSource, Reading, code_of


def load_file(source: ModelSource, reading: Reading) -> Loaded:
    """Load what a Python file defines; inputs that it does not define are derived from the model.

    Raises:
        UsageError: not Python, it raises, or it defines no such model (says what it does define).
        InputsError: inputs of another kind than dict, tuple, list or tensor, or none, and none can be
            derived.
    """
    path, name = source.path, source.name
    with _importable_from(path.parent):
        module = _run(path)
        model = _called(_attribute(module, name, path), f"{name}() in {path}")
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{name} in {path} is {a(model)}, not a torch.nn.Module (or a function that returns "
                f"one).{_models_in(module)}"
            )
        given, goal, stages = vars(module).get("inputs"), vars(module).get("goal"), _stages(module, path)
        at = given
        if (
            stages
            and callable(given)
            and not isinstance(given, torch.Tensor)
            and inspect.signature(given).parameters
        ):
            given = functools.partial(given, stages[0])
        if given is None:
            made = derive(
                model,
                reading if reading.training or not _trains(goal) else replace(reading, training=True),
                str(path),
            )
        else:
            made = Derived(*as_inputs(_called(given, f"inputs() in {path}"), f"inputs in {path}"))
        return Loaded(
            path=path,
            name=name,
            model=model,
            args=made.args,
            kwargs=made.kwargs,
            calibration=_calibration(module, path),
            loss=_function(module, "loss", path),
            optimizer=_optimizer(module, path),
            goal=goal,
            stages=stages,
            inputs_at=at if isinstance(given, functools.partial) else None,
            notes=made.notes,
            told=made.told,
        )


def _stages(module: ModuleType, path: Path) -> tuple[Any, ...]:
    """The stages of a run, if the file defines any."""
    given = vars(module).get("stages", ())
    if not isinstance(given, (list, tuple)):
        raise UsageError(f"stages in {path} is {a(given)}. Give a list of effcompile.Stage(steps=...).")
    return tuple(given)


def _trains(goal: object) -> bool:
    """Whether a goal as a file may define it is of a training step."""
    return (goal.get("mode") if isinstance(goal, Mapping) else getattr(goal, "mode", None)) == "training"


def _run(path: Path) -> ModuleType:
    """The file executed as a module."""
    module = ModuleType(f"_effcompile_model_{path.stem}")
    module.__file__ = str(path)
    code = code_of(path)
    sys.modules[module.__name__] = module  # dataclasses and pickles in the file look their module up
    with _blaming(path, "running it"):
        exec(code, vars(module))
    return module


@contextlib.contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """The file's folder first on sys.path, for the time of the import."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _blaming(path: Path, doing: str) -> Iterator[None]:
    """Turn what the user's code raises, sys.exit included, into a UsageError with the line of the user's
    file.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(path)
        raise UsageError(
            f"{path.name} raises while {doing}.\n  {where}\n  {type(error).__name__}: {error}"
        ) from error


def _attribute(module: ModuleType, name: str, path: Path) -> Any:
    if name in vars(module):
        return vars(module)[name]
    close = get_close_matches(name, _defined(module), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(
        f"{path} defines no `{name}`.{hint} It defines: "
        f"{', '.join(_defined(module)) or 'nothing'}.{_models_in(module)}"
    )


def _defined(module: ModuleType) -> list[str]:
    """Public names that the file made itself: its functions, classes, models and data, not what
    it imported.
    """

    def own(value: object) -> bool:
        made_here = getattr(value, "__module__", module.__name__) == module.__name__
        return isinstance(value, (nn.Module, torch.Tensor)) or (
            made_here and not isinstance(value, ModuleType)
        )

    return sorted(name for name, value in vars(module).items() if not name.startswith("_") and own(value))


def _models_in(module: ModuleType) -> str:
    models = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
    return f" Name one with {Path(str(module.__file__)).name}:{models[0]}." if models else ""


def _called(value: object, what: str) -> Any:
    """The value, or what the zero-argument callable returns (a module is callable, and meant itself)."""
    if isinstance(value, (nn.Module, torch.Tensor)) or not callable(value):
        return value
    name, _, file = what.partition(" in ")
    with _blaming(Path(file), f"calling {name}"):
        return value()


def _calibration(module: ModuleType, path: Path) -> tuple[Inputs, ...]:
    given = vars(module).get("calibration")
    if given is None:
        return ()
    made = _called(given, f"calibration() in {path}")
    if not isinstance(made, Iterable) or isinstance(made, (Mapping, torch.Tensor, str)):
        raise InputsError(
            f"calibration in {path} is {a(made)}. Give a list (or generator) of inputs, each like `inputs`."
        )
    with _blaming(path, "making calibration inputs"):
        batches = list(made)
    return tuple(as_inputs(batch, f"calibration[{i}] in {path}") for i, batch in enumerate(batches))


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any] | None:
    value = vars(module).get(name)
    if value is not None and not callable(value):
        raise UsageError(f"{name} in {path} is {a(value)}, not a function.")
    return value


def _optimizer(module: ModuleType, path: Path) -> Optimizer | Callable[..., Any] | None:
    given = vars(module).get("optimizer")
    return given if isinstance(given, Optimizer) else _function(module, "optimizer", path)
