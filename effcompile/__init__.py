"""effcompile: declare the budget; get the fastest plan that fits, with proof.

`import effcompile` is instant: everything below loads at its first use, torch included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from effcompile.plan import Plan
from effcompile.sparsity import SparsityFigures

if TYPE_CHECKING:
    __version__: str
    from rich.console import Console

    from effcompile.api import Executable, frontier, optimize
    from effcompile.dynamo import compilations
    from effcompile.errors import (
        CaptureError,
        EffcompileError,
        FormatError,
        InfeasibleError,
        InputsError,
        LoweringError,
        MissingPackageError,
        UnknownNameError,
        UsageError,
        VerificationError,
    )
    from effcompile.goal import Goal
    from effcompile.sparse.controller import DynamicSparsity
    from effcompile.target import Target

_HOME = {
    "optimize": "api",
    "frontier": "api",
    "Executable": "api",
    "compilations": "dynamo",
    "DynamicSparsity": "sparse.controller",
    "Goal": "goal",
    "Target": "target",
    "EffcompileError": "errors",
    "UsageError": "errors",
    "UnknownNameError": "errors",
    "InputsError": "errors",
    "FormatError": "errors",
    "CaptureError": "errors",
    "MissingPackageError": "errors",
    "InfeasibleError": "errors",
    "LoweringError": "errors",
    "VerificationError": "errors",
}

__all__ = [
    "CaptureError",
    "DynamicSparsity",
    "EffcompileError",
    "Executable",
    "FormatError",
    "Goal",
    "InfeasibleError",
    "InputsError",
    "LoweringError",
    "MissingPackageError",
    "Plan",
    "Target",
    "UnknownNameError",
    "UsageError",
    "VerificationError",
    "compilations",
    "frontier",
    "optimize",
    "plan",
]


def plan(model: Any, inputs: Any, **request: Any) -> Plan:
    """Decide without lowering: see effcompile.api.plan.

    A function of its own, not an entry of `_HOME`: the module effcompile.plan has the same name, and as it is
    imported above, this definition is what `effcompile.plan` means from here on.
    """
    return import_module("effcompile.api").plan(model, inputs, **request)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'effcompile' has no attribute {name!r}")
    value = getattr(import_module(f"effcompile.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("effcompile")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _print(plan: Plan, console: Console | None, verbose: bool) -> None:
    from effcompile.report import print_plan

    print_plan(plan, console, verbose)


def _print_sparsity(figures: SparsityFigures, console: Console | None) -> None:
    from effcompile.report import print_sparsity

    print_sparsity(figures, console)


Plan.printer = staticmethod(_print)
SparsityFigures.printer = staticmethod(_print_sparsity)
