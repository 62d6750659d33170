"""A run: the stages that a file defines, planned one after the other by the command `plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from effcompile import console
from effcompile.cli.job import Wanted
from effcompile.core.errors import UsageError
from effcompile.core.files import write_atomically

if TYPE_CHECKING:
    from effcompile.runs import Run

RUN, REPORT = "run.json", "report.html"


def plan_run(wanted: Wanted) -> Run:
    """The run of the file's stages, under what the command line asks.

    Raises:
        UsageError: the file has no optimizer, or inputs that are not a function of a stage. InfeasibleError:
            a stage does not fit.
    """
    from effcompile.runs import Stage, schedule

    loaded, asked = wanted.loaded, wanted.request
    if loaded.optimizer is None:
        raise UsageError(
            f"{loaded.path} defines stages but no optimizer: define optimizer(parameters), whose states "
            "are carried."
        )
    fixed: Any = loaded.kwargs or loaded.args

    def inputs(stage: Stage) -> Any:
        return fixed if loaded.inputs_at is None else loaded.inputs_at(stage)

    return schedule(
        loaded.model, loaded.stages, inputs=inputs, optimizer=loaded.optimizer, memory=asked.goal.memory,
        max_error=asked.goal.max_error, batch=asked.batch, lr=asked.lr, loss=loaded.loss, passes=asked.passes,
        target=asked.target,
    )  # fmt: skip


def tell_run(run: Run, as_json: bool, output: Path | None) -> None:
    """Print a run, and write run.json and report.html where that is asked."""
    data = run.to_dict()
    if output is not None:
        write_atomically(output / RUN, json.dumps(data, indent=1).encode())
        write_atomically(output / REPORT, run.html().encode())
    if as_json:
        console.emit(
            {**data, "written": [] if output is None else [str(output / name) for name in (RUN, REPORT)]}
        )
        return
    run.report()
    if output is None:
        typer.echo("\n Nothing was written. Add -o DIR to write run.json and report.html.")
