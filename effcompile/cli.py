"""The command line. Exit status: 0 done, 1 infeasible or not verified, 2 the request is wrong (130 interrupted).

torch takes seconds to import, so each command imports what it needs: `--help`, `targets`, `explain` and `diff` do not need it.
Results go to stdout, progress and errors to stderr; with `--json` stdout carries one JSON document, an error's too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from effcompile import console, report
from effcompile.cli_options import (
    HOW,
    OUTPUT,
    AsJson,
    BackendName,
    Dynamic,
    Job,
    KeepOutputs,
    MaxError,
    Memory,
    Minimize,
    Mode,
    ModelFile,
    Output,
    PassNames,
    PlanFile,
    Reads,
    Robust,
    SavedPlan,
    TargetName,
    Verbose,
)  # fmt: skip
from effcompile.core.errors import EffcompileError, InternalError, UsageError
from effcompile.core.files import write_atomically
from effcompile.core.folders import check_writable, read_steadily
from effcompile.core.units import format_seconds
from effcompile.ir import saved
from effcompile.ir.plan import Plan

if TYPE_CHECKING:
    from effcompile.compiler import Executable, TrainingExecutable
    from effcompile.machine.target import Target

app = typer.Typer(
    help="Declare the budget; get the fastest transformer that fits, with proof.",
    epilog="Start with:  effcompile optimize examples/bert.py --max-error 0.031 -o out/bert\n\n"
    "or, to train:  effcompile optimize examples/train_gpt2.py --mode training --memory 900MiB -o out/train",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def optimize(
    context: typer.Context,
    model: ModelFile,
    memory: Memory = None,
    max_error: MaxError = None,
    minimize: Minimize = None,
    mode: Mode = None,
    reads: Reads = None,
    robust: Robust = None,
    keep_outputs: KeepOutputs = False,
    target: TargetName = "auto",
    backend: BackendName = None,
    passes: PassNames = None,
    dynamic: Dynamic = None,
    plan: SavedPlan = None,
    output: Output = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Plan, lower and verify a model; print what was decided and measured."""
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    job = Job(file=model, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic, keep_outputs=keep_outputs).checked()
    given = None if plan is None else Plan.load(plan)
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose) as steps:
        wanted = job.load(steps, given)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            executable = wanted.carried_out()
        if output is not None:
            written = _write(executable, output)
    if as_json:
        console.emit({**executable.plan.to_dict(), "met": executable.plan.met, "written": [str(path) for path in written]})
    else:
        what = "plan.json and report.html" if wanted.request.training else "plan.json, report.html and the artifact"
        _print_plan(executable.plan, verbose, output, hint=f"Add -o DIR to write {what}.")
    if not executable.plan.met:
        raise typer.Exit(1)


@app.command("plan")
def plan_command(
    context: typer.Context,
    model: ModelFile,
    memory: Memory = None,
    max_error: MaxError = None,
    minimize: Minimize = None,
    mode: Mode = None,
    reads: Reads = None,
    robust: Robust = None,
    keep_outputs: KeepOutputs = False,
    target: TargetName = "auto",
    backend: BackendName = None,
    passes: PassNames = None,
    dynamic: Dynamic = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write plan.json and report.html there.", rich_help_panel=OUTPUT)
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Decide without lowering, also for machines that are not here (--target h100-sxm)."""
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    job = Job(file=model, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic, keep_outputs=keep_outputs).checked()
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose) as steps:
        wanted = job.load(steps)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            made = wanted.planned()
        if output is not None:
            saved.save(made, output, beside={saved.REPORT: report.html_report(made)})
            written = [output / saved.PLAN, output / saved.REPORT]
    if as_json:
        console.emit({**made.to_dict(), "written": [str(path) for path in written]})
    else:
        _print_plan(made, verbose, output, hint="Add -o DIR to write plan.json and report.html.")


@app.command()
def frontier(
    context: typer.Context,
    model: ModelFile,
    memory: Memory = None,
    max_error: MaxError = None,
    minimize: Minimize = None,
    mode: Mode = None,
    reads: Reads = None,
    robust: Robust = None,
    keep_outputs: KeepOutputs = False,
    target: TargetName = "auto",
    backend: BackendName = None,
    passes: PassNames = None,
    dynamic: Dynamic = None,
    points: Annotated[int | None, typer.Option(min=1, help="How many plans at the most: 8, in training 20.", rich_help_panel=HOW)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the picture there, as report.html.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What each byte of memory buys: predicted plans, none both larger and slower than another."""
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    job = Job(file=model, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic, keep_outputs=keep_outputs).checked()
    if output is not None:
        check_writable(output)
    with console.steps(as_json) as steps:
        wanted = job.load(steps)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            plans = wanted.frontier(points)
    if output is not None:
        write_atomically(output / saved.REPORT, report.frontier_html(plans).encode())
    if as_json:
        console.emit([plan.to_dict() for plan in plans])
    else:
        report.print_frontier(plans)


@app.command()
def explain(
    plan: PlanFile,
    site: Annotated[str | None, typer.Argument(metavar="[SITE]", help="A site, or a part of its name; without it, all sites.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why this choice, and why not another."""
    loaded = Plan.load(plan)
    if not as_json:
        report.explain(loaded, site)
        return
    name = None if site is None else report.find_site(loaded, site)
    data = loaded.to_dict()
    console.emit({part: [entry for entry in data[part] if name in (None, entry["site"])] for part in ("decisions", "declined")})


@app.command()
def diff(a: PlanFile, b: PlanFile, as_json: AsJson = False) -> None:
    """How two plans differ: goals, totals, decisions."""
    left, right = Plan.load(a), Plan.load(b)
    if not as_json:
        report.diff(left, right)
        return
    was, now = left.options(), right.options()
    sites = [site for site in {**was, **now} if was.get(site) != now.get(site)]
    sides = {name: {key: plan.to_dict()[key] for key in _COMPARED} for name, plan in (("a", left), ("b", right))}
    console.emit({**sides, "decisions": [{"site": site, "a": was.get(site), "b": now.get(site)} for site in sites]})


_COMPARED = ("model", "fingerprint", "goal", "target", "backend", "predicted", "measured")


@app.command()
def targets(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """The machines that effcompile has figures of."""
    from effcompile.machine.machines import known_targets, load_target

    known = [load_target(name) for name in known_targets()]
    if as_json:
        console.emit([_target_data(target) for target in known])
    else:
        report.targets_table(known, verbose=verbose)


@app.command()
def run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `effcompile optimize -o` wrote.")],
    inputs: Annotated[str | None, typer.Option(metavar="MODEL.PY", help="Take `inputs` from this file; otherwise generated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run and time a saved artifact."""
    plan = read_steadily(directory, lambda place: Plan.load(place / saved.PLAN))
    if plan.goal.mode == "training":
        raise UsageError(
            f"{str(directory / saved.PLAN)!r} plans a training step: there is no artifact to run. Apply it to the model in your training "
            f"script: model = effcompile.optimize(model, plan={str(directory / saved.PLAN)!r})"
        )
    with console.steps(as_json) as steps:
        from effcompile import compiler
        from effcompile.loader import load

        loaded = None if inputs is None else load(inputs)
        with steps.step("run"):
            ran = compiler.run_artifact(directory, None if loaded is None else (loaded.args, loaded.kwargs))
    planned = plan.measured.seconds if plan.measured else None
    if as_json:
        console.emit({"backend": plan.backend, "seconds": ran.seconds, "planned_seconds": planned, "outputs": list(ran.outputs)})
        return
    then = "" if planned is None else f" ({format_seconds(planned)} when it was made)"
    typer.echo(f"{plan.model} on {plan.backend}: {format_seconds(ran.seconds)} per call{then}")
    for output in ran.outputs:
        typer.echo(f"  {output}")


@app.command()
def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes: seconds instead of minutes.")] = False, as_json: AsJson = False
) -> None:
    """Measure this machine once; `--target auto` reads the result."""
    with console.steps(as_json) as steps:
        from effcompile import compiler

        path = compiler.calibrate(quick=quick, progress=steps)
    if as_json:
        console.emit({"path": str(path)})
    else:
        typer.echo(f"Measured this machine; the figures are in {path}")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False) -> None:
    if version:
        from effcompile import __version__

        typer.echo(f"effcompile {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors raised on purpose are told without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes its own start and stop to stderr
    console.prepare()
    try:
        status = _run(arguments)
    except OSError as error:
        status = console.tell_lost_output(error)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """The exit status of a command that did not exit by itself.

    Raises:
        OSError: what it says cannot be written.
    """
    try:
        console.check_current_folder()
        with console.stoppable():
            app(args=arguments, prog_name="effcompile", obj=arguments)
    except EffcompileError as error:
        if os.environ.get("EFFCOMPILE_DEBUG") or isinstance(error, InternalError):
            traceback.print_exc()
        return console.tell(error, "--json" in arguments)
    except (KeyboardInterrupt, console.Stopped) as error:
        sys.stderr.write("Interrupted.\n")
        return error.status if isinstance(error, console.Stopped) else 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # of a stream: opening a file names it
            raise
        return console.tell_bug(error, "--json" in arguments)
    return 0


def _write(executable: Executable | TrainingExecutable, directory: Path) -> list[Path]:
    """Plan, report and artifact (there is none of a training step) in place of what is in the folder; returns what was written."""
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


def _target_data(target: Target) -> dict[str, Any]:
    """A target's figures; measured laws and the probe are not for reading."""
    return {f.name: getattr(target, f.name) for f in fields(target) if f.name not in ("laws", "probe")}
