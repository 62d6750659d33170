"""The whole path of a training step: capture, price, solve, emit, prove by simulation, run,
verify, measure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

from torch import nn

from effcompile.compiler.another_machine import carried_out_here
from effcompile.compiler.training.attempt import PRICED_AGAIN, ROUNDS, Attempt, Ran
from effcompile.compiler.training.known import keep_plan, known_plan, place_of
from effcompile.compiler.training.sizes import best_measured
from effcompile.core import gpu
from effcompile.core.errors import FormatError, InfeasibleError, UsageError
from effcompile.core.reasons import Because
from effcompile.core.types import Args, Kwargs
from effcompile.core.units import format_bytes
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.ir.step import Step
from effcompile.machine.load import busy
from effcompile.machine.memory import give_back
from effcompile.ops.fused import Fused, compile_together
from effcompile.passes import IN_BACKWARD, ways, with_gradients_consumed
from effcompile.passes.training.base import Case
from effcompile.passes.training.checkpoint import Checkpoint, carried_out
from effcompile.passes.training.saved_blocks import chosen, held
from effcompile.planner.remat import BlockFront
from effcompile.proof.training.confirm import verified
from effcompile.proof.training.in_parts import runner_of
from effcompile.proof.training.items import taking_items
from effcompile.proof.training.verify import Result
from effcompile.runtime.training import TrainingExecutable
from effcompile.schedules.blocks import WHOLE, Block
from effcompile.schedules.emit import Emitted
from effcompile.search.progress import entry
from effcompile.search.refine import refine
from effcompile.search.request import Asked, Task
from effcompile.search.training.batch import Planned, Sized, as_saved, sized
from effcompile.search.training.branches import Branches
from effcompile.search.training.build import build_plan, fingerprint
from effcompile.search.training.cases import Joint
from effcompile.search.training.fit import within_machine
from effcompile.search.training.levers import Subsets, lever_rows
from effcompile.search.training.moved import RefutedError
from effcompile.search.training.prepare import Prepared
from effcompile.search.training.solve import frontier
from effcompile.search.training.work import Work, as_planned, make_work


@entry("plan")
def plan_training(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The best plan, simulated and certified; nothing of the model is run. Arguments as in Request.

    The machine's memory is the limit where the goal has none, or a larger one: see fit.py. For a machine that
    is not here, where no step fits whose gradients are all there at once, they are consumed in the backward.

    Raises:
        CaptureError, InputsError: the step cannot be captured. InfeasibleError: no schedule is within the
            budget.
    """
    work = make_work(task := Task.of(model, args, kwargs, asked))
    captured: list[Case] = []
    try:
        found, size = _decided(task, work, captured)
    except InfeasibleError:
        spec = with_gradients_consumed(task.request.passes)
        if work.figures.here or work.optimizer is None or spec is None:
            raise
        work = make_work(replace(task, request=replace(task.request, passes=spec)))
        work.notes.append(
            Because(
                "nothing fits with all gradients there at once: planned with --pass {name}=true",
                (IN_BACKWARD,),
            )
        )
        found, size = _decided(task, work, captured)
    plan = build_plan(
        found.joint, found.branches.chosen_from(found.joint), work.figures, work.goal, work.notes
    )
    plan = _with_levers(found.branches, found.joint, plan)
    return plan if size is None else size.told_in(plan)


def _decided(task: Task, work: Work, captured: list[Case]) -> tuple[Planned, Sized | None]:
    """The best plan within the goal and the machine, at the best size of those asked for.

    `captured`: the step, once it is.
    """
    if task.request.batch is not None:
        size = sized(task, work)
        return size.planned, size
    goal, figures = work.goal, work.figures
    if not captured:
        captured.append(work.capture(task.request.keep_outputs))
    branches = Branches(work=work, case=(case := captured[0]))
    elsewhere = not figures.here and (goal.memory is None or goal.memory > figures.target.memory_bytes)
    joint = within_machine(figures.target, branches.solve) if elsewhere else branches.solve(goal.memory)
    return Planned(work=work, case=case, branches=branches, joint=joint), None


@entry("optimize")
def optimize_training(
    model: nn.Module, args: Args, kwargs: Kwargs, *, hold: bool = True, **asked: Unpack[Asked]
) -> TrainingExecutable:
    """Plan a training step within a byte budget, build, verify and measure it. Arguments as in Request.

    `hold`: whether codes take the place of the model's frozen weights at once, where the plan has them; else
    its owner calls the runner's `hold_codes`.

    The model runs in its own mode: `model.train()` for dropout. Inputs' labels are among its keyword
    arguments.

    Raises:
        CaptureError, InputsError: the step cannot be captured. InfeasibleError: no schedule is within the
            budget.
        VerificationError: the planned step is not the model's own. FormatError: the plan is for another step.
    """
    task = Task.of(model, args, kwargs, asked)
    if task.request.backend not in (None, "torch"):
        raise UsageError(
            f"backend = {task.request.backend!r}: a training step runs on the backend 'torch'. Leave the "
            "backend out."
        )
    if task.request.plan is not None:
        return _taken_up(_reapply(task, task.request.plan), hold)
    work = make_work(task)
    if not work.figures.here:
        raise UsageError(
            f"The target {work.figures.target.name!r} is not this machine: a step can be planned for it, "
            "not run. Use plan."
        )
    if task.request.batch is None:
        return _taken_up(_answered(task, work), hold)
    found = best_measured(sized(task, work), lambda planned: _refined(planned.work, planned.case))
    result = _complete(*found.built)
    result.plan = found.chosen.told_in(result.plan, found.rates)
    return _taken_up(result, hold)


def _answered(task: Task, work: Work) -> TrainingExecutable:
    """The step by the plan that was found for the same question before, where it still holds; else planned,
    and kept for the next who asks.
    """
    case = work.capture(task.request.keep_outputs, runs=True)
    originals: dict[bool, Result] = {}
    if (place := place_of(work, case, task.request)) is None:
        return _complete(*_refined(work, case, originals))
    plan = known_plan(place, work.figures)
    if plan is not None and (made := _again(work, case, plan, originals)) is not None:
        return made
    attempt, ran = _refined(work, case, originals)
    before = ran.made.executable.plan.notes
    result = _complete(attempt, ran)
    if ran.first is not None:
        decided = (*ran.first.notes, *(note for note in result.plan.notes if note not in before))
        notes = tuple(note for note in decided if note not in work.notes)  # those of a run are told anew
        keep_plan(place, work.figures, replace(ran.first, levers=result.plan.levers, notes=notes))
    return result


def _again(work: Work, case: Case, plan: Plan, originals: dict[bool, Result]) -> TrainingExecutable | None:
    """The step by a plan of another day, verified and measured; None where what it promises is not so."""
    try:
        found = _applied(work, case, plan)
        peak = found.peak_bytes
        if peak != plan.predicted.peak_bytes:
            return None
        plan = replace(found.plan, guards=found.step.guards, notes=(*plan.notes, *work.notes))
        runner = runner_of(work.model, found.prepared.case, found.emitted)
        made = verified(found.work, found.prepared, runner, plan, None, originals)
    except (FormatError, RefutedError):
        return None
    misjudged = made.executable.plan.misjudged
    if misjudged is not None and plan.goal.minimize == "time" and not busy():
        work.figures.doubted |= work.figures.asked & work.figures.known.keys()
        work.notes.append(Because(PRICED_AGAIN, (round(misjudged, 2),)))
        return None
    return None if made.over else taking_items(made.executable, work, case.step, made.loss)


def _refined(work: Work, case: Case, originals: dict[bool, Result] | None = None) -> tuple[Attempt, Ran]:
    """The best plan that holds when it is run: what running shows to be wrong is a constraint of the next
    solve.

    `originals`: the model's own step, where it was run before (`verified`).
    """
    attempt = Attempt(work=work, case=case, originals={} if originals is None else originals)
    ran = refine(attempt.solve, attempt.run, rounds=ROUNDS, start=attempt.start())
    assert ran is not None, "the last round raises what it refutes"
    return attempt, ran


def _complete(attempt: Attempt, ran: Ran) -> TrainingExecutable:
    result = ran.made.executable
    result.plan = _with_levers(attempt.branches, ran.joint, result.plan)  # once, of the plan that is returned
    return taking_items(result, attempt.work, attempt.case.step, ran.made.loss)


def _taken_up(result: TrainingExecutable, hold: bool) -> TrainingExecutable:
    """The planned model, its frozen weights held as the plan says: nothing is compared with them any more."""
    if hold and result.runner.codes:
        result.runner.hold_codes()
        give_back()
    return result


def _with_levers(branches: Branches, joint: Joint, plan: Plan) -> Plan:
    """The plan with what each lever reaches alone within its budget, where that budget binds."""
    budget, captured, work = plan.goal.memory, plan.baseline.peak_bytes, branches.work
    if budget is None or captured is None or captured <= budget:
        return plan
    rows, notes = lever_rows(
        Subsets(found=branches.made, levers=work.passes.levers, figures=work.figures),
        joint,
        budget,
        work.progress,
    )
    return replace(plan, levers=rows, notes=(*plan.notes, *notes))


@entry("frontier")
def frontier_training(
    model: nn.Module, args: Args, kwargs: Kwargs, *, points: int = 20, **asked: Unpack[Asked]
) -> list[Plan]:
    """Predicted plans for budgets from the least feasible to the unlimited one, none both larger and slower
    than another.
    """
    work = make_work(task := Task.of(model, args, kwargs, asked))
    goal, progress = work.goal, work.progress
    branches = Branches(work=work, case=work.capture(task.request.keep_outputs))
    made: list[Joint] = []
    for found in branches.every():
        with progress.step("solve for every budget"):
            schedules = {
                id(p.cut): frontier(p, points) for p in {id(p.cut): p for p in found.variants}.values()
            }
        made += [Joint.of(replace(s, prepared=p)) for p in found.variants for s in schedules[id(p.cut)]]
    front: list[Joint] = []
    for s in sorted(made, key=lambda s: (s.peak_bytes, s.seconds)):
        if not front or s.seconds < front[-1].seconds:
            front.append(s)
    thinned = (
        front
        if len(front) <= points
        else [front[round(i * (len(front) - 1) / (points - 1))] for i in range(points)]
    )
    return [
        build_plan(s, branches.chosen_from(s), work.figures, replace(goal, memory=s.peak_bytes), work.notes)
        for s in thinned
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A saved plan on a step: its form and its schedule. `plan`: without what was measured of it.
    `peak_bytes`: as simulated.
    """

    work: Work
    step: Step
    prepared: Prepared
    emitted: Emitted
    plan: Plan
    peak_bytes: int


def applied_plan(task: Task, plan: Plan) -> Applied:
    """A saved plan's decisions on this model's step: nothing is solved, and nothing of it is run.

    Raises:
        FormatError: the plan is for another step, or its schedule is not within its budget.
    """
    held(plan)  # what is wrong in it is told before a step is captured
    work = as_planned(make_work(as_saved(task.for_plan(plan), plan)), plan)
    return _applied(work, work.capture(task.request.keep_outputs), plan)


def _applied(work: Work, case: Case, plan: Plan) -> Applied:
    """The same on a captured step. Raises FormatError as `applied_plan` does."""
    blocks, work = held(plan), as_planned(work, plan)
    checkpoint = work.passes.checkpoint
    no_options = _NoOptions(points=checkpoint.points, groups=checkpoint.groups)
    lazy = replace(work, passes=replace(work.passes, checkpoint=no_options))
    if fingerprint(case.step) != plan.fingerprint:
        raise _another(plan)
    (prepared,) = lazy.prepare(case).variants
    prepared = prepared.uncut if blocks.keys() == {WHOLE} else prepared
    prepared = replace(prepared, cut=replace(prepared.cut, ways=ways()))
    if case.optimizer is not None and prepared.case.states is None:
        raise FormatError(
            "The plan was made without an optimizer. Leave the optimizer out, or plan again with it."
        )
    emitted, trace = carried_out(prepared.cut, *chosen(prepared.cut, blocks))
    peak = (trace.footprint + prepared.case.beside).peak_bytes
    if plan.goal.memory is not None and excess(peak, plan.goal.memory):
        raise FormatError(
            f"The plan's schedule would peak at {format_bytes(peak)}, above its budget of "
            f"{format_bytes(plan.goal.memory)}: it was changed, or made by another version. Plan again."
        )
    compile_together(
        [
            node.target
            for part in (emitted.forward, emitted.backward)
            for node in part.nodes
            if isinstance(node.target, Fused)
        ]
    )  # else that would be measured as a part of the step
    fresh = replace(plan, checks=(), measured=None, measured_baseline=None)
    return Applied(work=work, step=case.step, prepared=prepared, emitted=emitted, plan=fresh, peak_bytes=peak)


def _reapply(task: Task, plan: Plan) -> TrainingExecutable:
    """Carry out a saved plan: it is simulated, verified and measured again."""
    found = applied_plan(task, plan)
    if (spread := found.prepared.step.spread) is not None:
        among = f"{spread.ranks} data-parallel ranks" * (spread.ranks > 1) + " × " * (
            min(spread.ranks, spread.split) > 1
        )
        among += f"{spread.split} tensor-parallel ranks" * (spread.split > 1)
        raise UsageError(
            f"The plan is for {among}. Run it under torchrun --nproc-per-node {spread.ranks * spread.split}, "
            "with effcompile.optimize(model, inputs=..., plan=..., "
            "mesh=torch.distributed.device_mesh.init_device_mesh(...))."
        )
    runner = runner_of(task.model, found.prepared.case, found.emitted)
    place = gpu.place_of(task.model, task.args, task.kwargs)
    made = verified(found.work, found.prepared, runner, carried_out_here(found.plan, place))
    return taking_items(made.executable, found.work, found.step, made.loss)


def _another(plan: Plan) -> FormatError:
    return FormatError(
        "This plan was made for another model or other shapes: its step has the fingerprint "
        f"{plan.fingerprint}. Plan this one anew, without --plan."
    )


class _NoOptions(Checkpoint):
    """For applying a plan: nothing is chosen, so no block is solved."""

    def front(self, block: Block) -> BlockFront:
        return BlockFront(options=(), found=0, complete=False, proven=False, solver="", seconds=0.0)
