"""Reads a `model.py`: what it defines as `model`, `inputs`, `loss`, `optimizer`, `calibration` and `goal`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.core.errors import InputsError, UsageError
from effcompile.core.types import Inputs, Kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a model.py defines.

    Attributes:
        path: the file; `name`: the attribute that the model came from.
        args, kwargs: the example inputs.
        calibration: inputs for measuring sensitivities and activation ranges, each as (args, kwargs); () when not given.
        loss: `loss(outputs, inputs)` or None. optimizer: one of the model's parameters, `optimizer(parameters)`, or None.
        goal: a Goal or a mapping of its fields, as written in the file, or None.
    """

    path: Path
    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Kwargs
    calibration: tuple[Inputs, ...] = ()
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | Callable[..., Any] | None = None
    goal: Any = None


def load(spec: str) -> Loaded:
    """Load `model.py` or `model.py:name`.

    Raises:
        UsageError: no such file, not Python, it raises, or it defines no such model (says what it does define).
        InputsError: no `inputs`, or inputs of another kind than dict, tuple, list or tensor.
    """
    path, name = _split(spec)
    with _importable_from(path.parent):
        module = _run(path)
        model = _called(_attribute(module, name, path), f"{name}() in {path}")
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{name} in {path} is {_a(model)}, not a torch.nn.Module (or a function that returns one).{_models_in(module)}"
            )
        given = vars(module).get("inputs")
        if given is None:
            raise InputsError(
                f"{path} defines no `inputs`. Add example inputs: a dict of keyword arguments, a tuple of positional ones, or one tensor."
            )
        args, kwargs = as_inputs(_called(given, f"inputs() in {path}"), f"inputs in {path}")
        return Loaded(
            path=path,
            name=name,
            model=model,
            args=args,
            kwargs=kwargs,
            calibration=_calibration(module, path),
            loss=_function(module, "loss", path),
            optimizer=_optimizer(module, path),
            goal=vars(module).get("goal"),
        )


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
    raise InputsError(f"{what}: {_a(value)} is not usable. Give a dict of keyword arguments, a tuple of positional ones, or one tensor.")


def _split(spec: str) -> tuple[Path, str]:
    """`model.py:name` into path and attribute; a colon is part of the path when such a file exists."""
    path, colon, name = spec.rpartition(":")
    if not colon or Path(spec).exists():
        path, name = spec, "model"
    file = Path(path)
    if not name.isidentifier():
        raise UsageError(f"{name!r} in {spec!r} is not a name. Write model.py or model.py:name.")
    if file.is_dir():
        raise UsageError(f"{path!r} is a folder. Name the Python file in it that defines `model` and `inputs`.")
    if not file.is_file():
        siblings = [str(p.name) for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = get_close_matches(file.name, siblings, n=1)
        hint = f" Did you mean {str(file.parent / close[0])!r}?" if close else ""
        raise UsageError(f"No such file: {path!r}.{hint}")
    return file.resolve(), name


def _run(path: Path) -> ModuleType:
    """The file executed as a module."""
    module = ModuleType(f"_effcompile_model_{path.stem}")
    module.__file__ = str(path)
    try:
        code = compile(importlib.util.decode_source(path.read_bytes()), str(path), "exec")
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"{path} is not Python{line}: {error.msg if isinstance(error, SyntaxError) else error}") from error
    except OSError as error:
        raise UsageError(f"Cannot read {str(path)!r}: {error.strerror or error}.") from error
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
    """Turn what the user's code raises, sys.exit included, into a UsageError with the line of the user's file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(path)
        raise UsageError(f"{path.name} raises while {doing}.\n  {where}\n  {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, name: str, path: Path) -> Any:
    if name in vars(module):
        return vars(module)[name]
    close = get_close_matches(name, _defined(module), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"{path} defines no `{name}`.{hint} It defines: {', '.join(_defined(module)) or 'nothing'}.{_models_in(module)}")


def _defined(module: ModuleType) -> list[str]:
    """Public names that the file made itself: its functions, classes, models and data, not what it imported."""

    def own(value: object) -> bool:
        made_here = getattr(value, "__module__", module.__name__) == module.__name__
        return isinstance(value, (nn.Module, torch.Tensor)) or (made_here and not isinstance(value, ModuleType))

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
        raise InputsError(f"calibration in {path} is {_a(made)}. Give a list (or generator) of inputs, each like `inputs`.")
    with _blaming(path, "making calibration inputs"):
        batches = list(made)
    return tuple(as_inputs(batch, f"calibration[{i}] in {path}") for i, batch in enumerate(batches))


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any] | None:
    value = vars(module).get(name)
    if value is not None and not callable(value):
        raise UsageError(f"{name} in {path} is {_a(value)}, not a function.")
    return value


def _optimizer(module: ModuleType, path: Path) -> Optimizer | Callable[..., Any] | None:
    given = vars(module).get("optimizer")
    return given if isinstance(given, Optimizer) else _function(module, "optimizer", path)


def _a(value: object) -> str:
    """A value's type as a phrase: `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
