"""effcompile: declare the budget; get the fastest plan that fits, with proof.

`import effcompile` is instant: everything below loads at its first use, torch included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from effcompile.core import spoken

if TYPE_CHECKING:
    __version__: str
    from rich.console import Console

    from effcompile.api import Executable, frontier, load, optimize, plan
    from effcompile.core.errors import (
        CaptureError,
        EffcompileError,
        FormatError,
        GuardError,
        InfeasibleError,
        InputsError,
        LoweringError,
        MissingPackageError,
        OutOfMemoryError,
        UnknownNameError,
        UsageError,
        VerificationError,
    )
    from effcompile.core.goal import Goal
    from effcompile.core.reasons import Reason
    from effcompile.dynamo import compilations
    from effcompile.ir.plan import Plan
    from effcompile.ir.sparsity import SparsityFigures
    from effcompile.ir.strategy import Strategy
    from effcompile.machine.cluster import Cluster
    from effcompile.machine.target import Target
    from effcompile.runs import (
        CriticalBatch,
        Run,
        Scores,
        SparseLayers,
        Stage,
        critical_batch,
        schedule,
        scores,
        sparse_layers,
    )
    from effcompile.runtime.training import TrainingExecutable
    from effcompile.sparse.controller import DynamicSparsity

_HOME = {
    "optimize": "api",
    "frontier": "api",
    "load": "api",
    "plan": "api",
    "Run": "runs",
    "Stage": "runs",
    "Scores": "runs",
    "CriticalBatch": "runs",
    "critical_batch": "runs",
    "SparseLayers": "runs",
    "sparse_layers": "runs",
    "schedule": "runs",
    "scores": "runs",
    "Executable": "api",
    "TrainingExecutable": "runtime.training",
    "compilations": "dynamo",
    "DynamicSparsity": "sparse.controller",
    "Goal": "core.goal",
    "Plan": "ir.plan",
    "Strategy": "ir.strategy",
    "Cluster": "machine.cluster",
    "Target": "machine.target",
    "EffcompileError": "core.errors",
    "UsageError": "core.errors",
    "UnknownNameError": "core.errors",
    "InputsError": "core.errors",
    "FormatError": "core.errors",
    "CaptureError": "core.errors",
    "GuardError": "core.errors",
    "OutOfMemoryError": "core.errors",
    "MissingPackageError": "core.errors",
    "InfeasibleError": "core.errors",
    "LoweringError": "core.errors",
    "VerificationError": "core.errors",
}

__all__ = [
    "CaptureError",
    "Cluster",
    "CriticalBatch",
    "DynamicSparsity",
    "EffcompileError",
    "Executable",
    "FormatError",
    "Goal",
    "GuardError",
    "InfeasibleError",
    "InputsError",
    "LoweringError",
    "MissingPackageError",
    "OutOfMemoryError",
    "Plan",
    "Run",
    "Scores",
    "SparseLayers",
    "Stage",
    "Strategy",
    "Target",
    "TrainingExecutable",
    "UnknownNameError",
    "UsageError",
    "VerificationError",
    "compilations",
    "critical_batch",
    "frontier",
    "load",
    "optimize",
    "plan",
    "schedule",
    "scores",
    "sparse_layers",
]


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


def _reason_words(reason: Reason) -> str:
    from effcompile.report.reasons import words

    return words(reason)


def _infeasible_words(error: InfeasibleError) -> str:
    from effcompile.report.causes import message

    return message(error)


spoken.print_plan, spoken.print_sparsity = _print, _print_sparsity
spoken.of_infeasible, spoken.of_reason = _infeasible_words, _reason_words
