"""The commands that decide: `optimize`, `plan` and `frontier`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from effcompile import console, report
from effcompile.cli import ranks
from effcompile.cli.job import Job, Many, parsed_shape
from effcompile.cli.options import (
    HOW,
    OUTPUT,
    AllowPickle,
    AsJson,
    BackendName,
    Batch,
    BatchTokens,
    Context,
    DeviceCount,
    Devices,
    Dynamic,
    GlobalBatch,
    KeepOutputs,
    LearningRate,
    MaxError,
    Memory,
    Minimize,
    Mode,
    ModelFile,
    New,
    Nodes,
    Output,
    PassNames,
    Prompt,
    Reads,
    Robust,
    SavedPlan,
    Shape,
    StrategyText,
    TargetName,
    Task,
    TrustRemoteCode,
    Verbose,
)  # fmt: skip
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.files import write_atomically
from effcompile.core.folders import check_writable
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.loader.source import Reading

if TYPE_CHECKING:
    from effcompile.compiler import Executable, TrainingExecutable


def optimize(
    context: typer.Context,
    model: ModelFile,
    task: Task = None,
    shape: Shape = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    memory: Memory = None,
    max_error: MaxError = None,
    minimize: Minimize = None,
    mode: Mode = None,
    reads: Reads = None,
    robust: Robust = None,
    keep_outputs: KeepOutputs = False,
    batch: Batch = None,
    tokens: Context = None,
    prompt: Prompt = None,
    new: New = None,
    lr: LearningRate = None,
    target: TargetName = "auto",
    backend: BackendName = None,
    passes: PassNames = None,
    dynamic: Dynamic = None,
    devices: Devices = None,
    strategy: StrategyText = None,
    plan: SavedPlan = None,
    output: Output = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Plan, lower and verify a model; print what was decided and measured."""
    given = None if plan is None else Plan.load(plan)
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    goal |= {"context": tokens, "prompt": prompt, "new": new}
    axes = ranks.axes_asked(devices, strategy, mode, backend)
    passes = [*(passes or ()), *axes.passes] if axes.several else passes
    reading = Reading(task=task, shape=parsed_shape(shape), trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    job = Job(
        file=model, reading=reading, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic,
        keep_outputs=keep_outputs, batch=batch, lr=lr,
    ).checked()  # fmt: skip
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose) as steps:
        wanted = job.load(steps, given)
        with console.explaining(wanted.request.goal, as_json, context.obj):
            if axes.several:
                made, written = ranks.plan_for_ranks(wanted, output, model, reading)
            else:
                executable = wanted.carried_out()
                made = executable.plan
                if output is not None:
                    written = _write(executable, output)
    if as_json:
        console.emit({**made.to_dict(), "met": made.met, "written": [str(path) for path in written]})
    else:
        what = "plan.json and report.html" if wanted.request.training else "plan.json, report.html and the artifact"
        _print_plan(made, verbose, output, hint=f"Add -o DIR to write {what}.")
        if devices is not None and devices > 1 and output is not None:
            typer.echo("\n launch   " + "\n          ".join(ranks.launch_lines(output, devices)))
            typer.echo(f" verify   effcompile verify {output} --ranks {max(2, axes.tp)}")
    if not made.met:
        raise typer.Exit(1)


def plan(
    context: typer.Context,
    model: ModelFile,
    task: Task = None,
    shape: Shape = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    memory: Memory = None,
    max_error: MaxError = None,
    minimize: Minimize = None,
    mode: Mode = None,
    reads: Reads = None,
    robust: Robust = None,
    keep_outputs: KeepOutputs = False,
    batch: Batch = None,
    tokens: Context = None,
    prompt: Prompt = None,
    new: New = None,
    lr: LearningRate = None,
    target: TargetName = "auto",
    backend: BackendName = None,
    passes: PassNames = None,
    dynamic: Dynamic = None,
    devices: DeviceCount = None,
    nodes: Nodes = None,
    strategy: StrategyText = None,
    global_batch: GlobalBatch = None,
    batch_tokens: BatchTokens = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write plan.json and report.html there.", rich_help_panel=OUTPUT)
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Decide without lowering, also for machines that are not here (--target h100-sxm), several (a,b,c), or many (--devices 64)."""
    many = Many(devices=devices, nodes=nodes, strategy=strategy, global_batch=global_batch, batch_tokens=batch_tokens).checked()
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    goal |= {"context": tokens, "prompt": prompt, "new": new}
    reading = Reading(task=task, shape=parsed_shape(shape), trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    job = Job(
        file=model, reading=reading, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic,
        keep_outputs=keep_outputs, batch=batch, lr=lr,
    ).checked()  # fmt: skip
    if "," in target and many.count is not None:
        raise UsageError(f"--target {target} compares machines for one device each: give one target with --devices.")
    if "," in target:
        _compare_targets(job, as_json, output)
        return
    if output is not None:
        saved.check_folder(output)
    written: list[Path] = []
    with console.steps(as_json, verbose) as steps:
        wanted = job.load(steps).among(many)
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


def frontier(
    context: typer.Context,
    model: ModelFile,
    task: Task = None,
    shape: Shape = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
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
    """What each byte of memory buys: predicted plans, none both larger and slower than another; of a saved plan, an estimate."""
    if saved.is_plan(Path(model)):
        _curve_of(Plan.load(model), points or 12, as_json)
        return
    goal = {"memory": memory, "max_error": max_error, "minimize": minimize, "mode": mode, "reads": reads, "robust": robust}
    reading = Reading(task=task, shape=parsed_shape(shape), trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    job = Job(
        file=model, reading=reading, changes=goal, target=target, backend=backend, passes=passes, dynamic=dynamic, keep_outputs=keep_outputs
    ).checked()
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
        console.emit({name: plan.to_dict() if isinstance(plan, Plan) else {"infeasible": plan} for name, plan in made.items()})
    else:
        report.print_side_by_side(made)
    if not any(isinstance(plan, Plan) for plan in made.values()):
        raise typer.Exit(1)


def _curve_of(plan: Plan, points: int, as_json: bool) -> None:
    """What memory buys, by the options of a saved plan: without the model, and without solving."""
    if as_json:
        rows = report.curve(plan, points)
        console.emit([{"peak_bytes": size, "seconds": seconds, "change": change, "estimate": True} for size, seconds, change in rows])
    else:
        report.print_curve(plan, points)


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
