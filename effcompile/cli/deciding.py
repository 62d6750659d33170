"""The commands that decide: `optimize`, `plan` and `frontier`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from effcompile import console, report
from effcompile.cli import ranks, stages
from effcompile.cli.job import Job, Many, spread
from effcompile.cli.options import (
    HOW,
    OUTPUT,
    AsJson,
    Devices,
    Output,
    Profile,
    SavedPlan,
    StrategyText,
    Verbose,
)  # fmt: skip
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.files import write_atomically
from effcompile.core.folders import check_writable
from effcompile.ir import saved
from effcompile.ir.plan import Plan

if TYPE_CHECKING:
    from effcompile.compiler import Executable, TrainingExecutable


@spread()
def optimize(
    context: typer.Context,
    job: Job,
    devices: Devices = None,
    strategy: StrategyText = None,
    plan: SavedPlan = None,
    output: Output = None,
    verbose: Verbose = False,
    profile: Profile = False,
    as_json: AsJson = False,
) -> None:
    """Plan, lower and verify a model; print what was decided and measured."""
    given = None if plan is None else Plan.load(plan)
    axes = ranks.axes_asked(devices, strategy, job.mode, job.backend)
    job = replace(job, passes=[*(job.passes or ()), *axes.passes]) if axes.several else job
    job.check()
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose, profile) as steps:
        wanted = job.load(steps, given)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            if axes.several:
                made, written = ranks.plan_for_ranks(wanted, devices or 1, output, job.model, job.reading)
            else:
                executable = wanted.carried_out()
                made = executable.plan
                if wanted.request.training:  # nothing is exported: what is left is little
                    console.keep_what_is_there()
                if output is not None:
                    written = _write(executable, output)
    if as_json:
        console.emit({**made.to_dict(), "met": made.met, "written": [str(path) for path in written]})
    else:
        what = (
            "plan.json and report.html"
            if wanted.request.training
            else "plan.json, report.html and the artifact"
        )
        _print_plan(made, verbose, output, hint=f"Add -o DIR to write {what}.")
        if devices is not None and devices > 1 and output is not None:
            typer.echo("\n launch   " + "\n          ".join(ranks.launch_lines(output, devices)))
            typer.echo(
                f" verify   effcompile verify {output} --ranks {max(2, min(2, axes.dp) * axes.tp * axes.pp)}"
            )
    if not made.met:
        raise typer.Exit(1)


@spread()
def plan(
    context: typer.Context,
    job: Job,
    many: Many,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write plan.json and report.html there.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    verbose: Verbose = False,
    profile: Profile = False,
    as_json: AsJson = False,
) -> None:
    """Decide without lowering; --target h100-sxm for a machine that is not here, --devices 64 for many. Of a
    file's stages, a run.
    """
    many.check()
    job.check()
    if "," in job.target and many.count is not None:
        raise UsageError(
            f"--target {job.target} compares machines for one device each: give one target with --devices."
        )
    if "," in job.target:
        _compare_targets(job, as_json, output)
        return
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose, profile) as steps:
        wanted = job.load(steps).among(many)
        if wanted.loaded.stages:
            with console.explaining(wanted.request.goal, as_json, context.obj):
                run = stages.plan_run(wanted)
            stages.tell_run(run, as_json, output)
            return
        with console.explaining(wanted.request.goal, as_json, context.obj):
            made = wanted.planned()
        if output is not None:
            saved.save(made, output, beside={saved.REPORT: report.html_report(made)})
            written = [output / saved.PLAN, output / saved.REPORT]
    if as_json:
        console.emit({**made.to_dict(), "written": [str(path) for path in written]})
    else:
        _print_plan(made, verbose, output, hint="Add -o DIR to write plan.json and report.html.")
    if made.distributed is not None and made.distributed.verdict == "no":
        raise typer.Exit(1)


@spread("batch", "lr")
def frontier(
    context: typer.Context,
    job: Job,
    points: Annotated[
        int | None,
        typer.Option(min=1, help="How many plans at the most: 8, in training 20.", rich_help_panel=HOW),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the picture there, as report.html.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    profile: Profile = False,
    as_json: AsJson = False,
) -> None:
    """What each byte of memory buys: predicted plans, none both larger and slower than another; of a saved
    plan, an estimate.
    """
    if saved.is_plan(Path(job.model)):
        _curve_of(Plan.load(job.model), points or 12, as_json)
        return
    job.check()
    if output is not None:
        check_writable(output)
    with console.steps(as_json, profile=profile) as steps:
        wanted = job.load(steps)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            plans = wanted.frontier(points)
    if output is not None:
        command = _as_optimize(context)
        write_atomically(output / saved.REPORT, report.frontier_html(plans, command=command).encode())
    if as_json:
        console.emit([plan.to_dict() for plan in plans])
    else:
        report.print_frontier(plans)


def _as_optimize(context: typer.Context) -> str:
    """The command line that was typed, as one of `optimize`, without a memory."""
    typed = [context.params["model"]]
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        source = context.get_parameter_source(name)
        by_hand = source is not None and source.name == "COMMANDLINE"
        if by_hand and name not in ("model", "memory", "points", "output", "profile", "as_json"):
            for one in value if isinstance(value, list | tuple) else [value]:
                typed += [parameter.opts[0]] if one is True else [parameter.opts[0], str(one)]
    return "effcompile optimize " + shlex.join(map(str, typed))


def _compare_targets(job: Job, as_json: bool, output: Path | None) -> None:
    """A plan for each of several machines, side by side; one that cannot be is a row that says so."""
    if output is not None:
        raise UsageError("-o holds one plan. Name one target with it, or leave -o out.")
    made: dict[str, Plan | str] = {}
    with console.steps(as_json) as steps:
        wanted = job.load(steps)
        for name in job.targets:
            try:
                made[name] = wanted.for_target(name).planned()
            except InfeasibleError as error:
                made[name] = str(error)
    if as_json:
        console.emit(
            {
                name: plan.to_dict() if isinstance(plan, Plan) else {"infeasible": plan}
                for name, plan in made.items()
            }
        )
    else:
        report.print_side_by_side(made)
    if not any(isinstance(plan, Plan) for plan in made.values()):
        raise typer.Exit(1)


def _curve_of(plan: Plan, points: int, as_json: bool) -> None:
    """What memory buys, by the options of a saved plan: without the model, and without solving."""
    if as_json:
        rows = report.curve(plan, points)
        console.emit(
            [
                {"peak_bytes": size, "seconds": seconds, "change": change, "estimate": True}
                for size, seconds, change in rows
            ]
        )
    else:
        report.print_curve(plan, points)


def _write(executable: Executable | TrainingExecutable, directory: Path) -> list[Path]:
    """Plan, report and artifact (there is none of a training step) in place of what is in the folder; returns
    what was written.
    """
    beside = {saved.REPORT: report.html_report(executable.plan)}
    if executable.plan.goal.mode == "training":
        saved.save(executable.plan, directory, beside=beside)
    else:
        cast("Executable", executable).save(directory, beside=beside)
    return sorted(directory.iterdir())


def _print_plan(plan: Plan, verbose: bool, directory: Path | None, *, hint: str) -> None:
    report.print_plan(plan, verbose=verbose, directory=None if directory is None else str(directory))
    if directory is None:
        typer.echo(f"\n Nothing was written. {hint}")
