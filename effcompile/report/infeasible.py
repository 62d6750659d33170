"""Why a goal cannot be met, in words, and what would be possible: the exact flag to type."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes, format_error
from effcompile.report.causes import head, parts, remedy, sentence
from effcompile.report.figures import format_ratio
from effcompile.report.page import BAD, DIM, STRONG, Column, Page, Row

_GIB, _MIB = 2**30, 2**20


def print_infeasible(
    error: InfeasibleError,
    goal: Goal,
    console: Console | None = None,
    *,
    arguments: Sequence[str] | None = None,
) -> None:
    """Print the goal, the limits that cannot hold together, and for each limit the smallest value that would
    be feasible.

    Args:
        error: says why, and what would be feasible.
        goal: what was asked.
        console: default stdout.
        arguments: of the command that was typed; each change is then also printed as a command to run.
    """
    page = Page(console)
    page.field("goal", Text(goal.describe(), style=STRONG), Text("✘ infeasible", style=BAD))
    for number, cause in enumerate(error.why):
        there = parts(cause)
        page.field("why" if number == 0 else "", f"{head(cause, number > 0)}{':' * bool(there)}")
        rows = [Row(cells=[" " * 9, format_bytes(size), name]) for name, size in there]
        page.table([Column(), Column(right=True, style=STRONG), Column(fit="cut")], rows)
    page.fields("", map(sentence, error.untried))
    if not error.nearest:
        page.field("", remedy(error) or "Which limit to loosen is not known.")
        return
    page.blank()
    only = (
        "the smallest budget that is feasible:"
        if list(error.nearest) == ["memory"] and goal.mode == "training"
        else ""
    )
    page.field("nearest", only or "changing any one of these makes it possible, all else unchanged:")
    columns = [Column(), Column(style=STRONG), Column(style=DIM, fit="wrap")]
    page.table(
        columns,
        [
            Row(cells=[" " * 8, flag(name, value), _instead(goal, name, value)])
            for name, value in error.nearest.items()
        ],
    )
    if arguments:
        page.blank()
        for number, (name, value) in enumerate(error.nearest.items()):
            page.verbatim("next" if number == 0 else "", command(arguments, name, value))


def command(arguments: Sequence[str], limit: str, value: float) -> str:
    """The command that was typed with one limit changed, ready to be run."""
    name, size = flag(limit, value).split()
    words: list[str] = []
    given = iter(arguments)
    for word in given:
        if word == name:
            next(given, None)
        elif not word.startswith(f"{name}="):
            words.append(word)
    return shlex.join(["effcompile", *words, name, size])


def flag(limit: str, value: float) -> str:
    """The option to type, rounded up so that what is typed is feasible: `--memory 0.98GiB`, `--max-error
    1.2e-2`.
    """
    name = "--" + limit.replace("_", "-")
    if limit == "max_error":
        return f"{name} {_error_up(value)}"
    if limit == "memory":
        unit, size = ("GiB", _GIB) if value >= 0.1 * _GIB else ("MiB", _MIB)
        return f"{name} {math.ceil(value / size * 100 - 1e-9) / 100:.2f}{unit}"
    return f"{name} {value:g}"


def _error_up(value: float) -> str:
    """Two significant digits, never below the value."""
    if value <= 0:
        return "0"
    exponent = math.floor(math.log10(value))
    digits = math.ceil(value / 10.0 ** (exponent - 1) - 1e-9)
    return format_error(digits * 10.0 ** (exponent - 1))


def _instead(goal: Goal, limit: str, value: float) -> str:
    """What stands there now."""
    current = getattr(goal, limit, None)
    if not current:
        return "instead of an exact plan" if limit == "max_error" else ""
    shown = format_bytes(current) if limit == "memory" else format_error(current)
    return f"instead of {shown} ({format_ratio(value / current)})"
