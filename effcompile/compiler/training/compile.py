"""The whole path of a training step: capture, price, solve, emit, prove by simulation, run, verify, measure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from effcompile.backends.torch.training import StepRunner
from effcompile.compiler.machine import AUTO, resolve
from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training import verify
from effcompile.compiler.training.attend import FUSED, WRITTEN, Captured, captured
from effcompile.compiler.training.build import build_plan, fingerprint, restored, unfused
from effcompile.compiler.training.executable import TrainingExecutable, planned
from effcompile.compiler.training.figures import keep_figures, known_figures
from effcompile.compiler.training.moved import MEASURED, TooCoarseError, host_use, uses_compression
from effcompile.compiler.training.prepare import ALONE, Figures, Preparation, Prepared, prepare, with_levers
from effcompile.compiler.training.solve import Schedule, best_schedule, frontier
from effcompile.errors import FormatError, InfeasibleError, UsageError, VerificationError
from effcompile.goal import Goal
from effcompile.passes import Levers, load_attention, load_levers, load_training_passes
from effcompile.passes.checkpoint import Checkpoint
from effcompile.passes.fused_attention import FusedAttention
from effcompile.passes.heads import LossHeads
from effcompile.passes.pointwise import Pointwise
from effcompile.plan import Plan, Totals
from effcompile.planner.remat import BlockFront
from effcompile.target import Target
from effcompile.units import format_bytes

#: Solves again at the most when the allocator's peak is above the budget though the simulated one is not.
_REMEASURED = 3
#: Seconds that timing the step beside the original may take, once both have run.
_TIMING_SECONDS = 20.0

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request, and what has been found out on the way."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    goal: Goal
    loss: Loss | None
    checkpoint: Checkpoint
    heads: LossHeads | None
    pointwise: Pointwise | None
    attention: FusedAttention | None
    figures: Figures
    levers: Levers = ALONE
    progress: Progress = QUIET
    notes: list[str] = field(default_factory=list)

    def capture(self, keep_outputs: bool) -> Captured:
        """The joint graph of the step, in one or two forms."""
        with self.progress.step("capture the step"):
            return captured(self.model, self.args, self.kwargs, self.loss, keep_outputs, self.attention)

    def prepare(self, step: Captured, unfused: Collection[frozenset[str]] | None = None) -> Preparation:
        """Its variants with their options; what was measured for them is kept for the next plan."""
        found = prepare(
            step.step, self.checkpoint, self.heads, self.pointwise, self.figures, self.progress,
            forms=step.forms(self.attention), unfused=unfused, levers=self.levers,
        )  # fmt: skip
        found = replace(found, attended=step.attended)
        if self.figures.here and (note := keep_figures(self.figures.known)):
            self.notes.append(note)
        return found

    def eager_loss(self) -> torch.Tensor:
        """The original's loss at the example inputs."""
        args, kwargs = self.args, dict(self.kwargs)
        if self.loss is not None:
            taken = inspect.signature(self.model.forward).parameters
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
                kwargs = {name: value for name, value in kwargs.items() if name in taken}
        outputs = self.model(*args, **kwargs)
        whole = (self.args, dict(self.kwargs)) if self.args and self.kwargs else self.args or dict(self.kwargs)
        return verify.loss_of(outputs, whole, self.loss)


def plan_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, goal: Goal, target: str | Target = AUTO,
    passes: Sequence[str] | None = None, loss: Loss | None = None, keep_outputs: bool = False, progress: Progress = QUIET,
) -> Plan:  # fmt: skip
    """The best plan, simulated and certified; nothing of the model is run. Arguments as in `optimize_training`.

    Raises:
        CaptureError, InputsError: the step cannot be captured. InfeasibleError: no schedule is within the budget.
    """
    work = _work(model, args, kwargs, goal, target, passes, loss, progress)
    found = work.prepare(work.capture(keep_outputs))
    best, others = best_schedule(found.variants, work.checkpoint, goal.memory, progress=progress)
    return build_plan(best, others, found, work.figures, goal, work.notes)


def optimize_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, goal: Goal, target: str | Target = AUTO,
    backend: str | None = None, plan: Plan | None = None, passes: Sequence[str] | None = None, loss: Loss | None = None,
    keep_outputs: bool = False, progress: Progress = QUIET,
) -> TrainingExecutable:  # fmt: skip
    """Plan a training step within a byte budget, build, verify and measure it.

    Args:
        model: any nn.Module; left as it is. It runs in its own mode: `model.train()` for dropout.
        args: positional example inputs; the plan holds for their shapes.
        kwargs: example inputs by keyword, labels among them.
        goal: with mode "training"; `memory` bounds the true peak of the step.
        target: this machine, or another one to take operator times from.
        backend: "torch" or None: a training step runs on torch's own kernels.
        plan: an earlier plan of this step, applied without solving.
        passes: `checkpoint`, `loss_head`, their options, or `no-loss_head`; `offload`, `compress` where they are wanted too.
        loss: `loss(outputs, inputs)`, for a forward that returns none.
        keep_outputs: also return what the model returns beside the loss, detached.
        progress: is told what is being done.

    Raises:
        CaptureError, InputsError: the step cannot be captured. InfeasibleError: no schedule is within the budget.
        VerificationError: the planned step is not the model's own. FormatError: the plan is for another step.
    """
    if backend not in (None, "torch"):
        raise UsageError(f"backend = {backend!r}: a training step runs on the backend 'torch'. Leave the backend out.")
    if plan is not None:
        return _reapply(model, args, kwargs, plan, passes, loss, keep_outputs, progress)
    work = _work(model, args, kwargs, goal, target, passes, loss, progress)
    if not work.figures.here:
        raise UsageError(f"The target {work.figures.target.name!r} is not this machine: a step can be planned for it, not run. Use plan.")
    found = work.prepare(work.capture(keep_outputs))
    budget = goal.memory
    for _ in range(_REMEASURED):
        best, others = best_schedule(found.variants, work.checkpoint, budget, progress=progress)
        made = build_plan(best, others, found, work.figures, goal, work.notes)
        try:
            result, excess = _verified(work, best.prepared, StepRunner(model, best.prepared.step, best.emitted), made)
        except TooCoarseError as error:
            work, found = _without_compression(work, found, error, budget)
            continue
        if excess <= 0 or budget is None:
            return result
        work.notes.append(f"the allocator's peak was {format_bytes(excess)} above the budget: solved again with so much less")
        budget -= excess
    return result


def _without_compression(work: Work, found: Preparation, error: TooCoarseError, budget: int | None) -> tuple[Work, Preparation]:
    """The same work with all values exact, as the gradient's error was measured to be above the goal's.

    Raises:
        InfeasibleError: nothing is within the budget then.
    """
    note = f"nothing is compressed: {error}"
    work.notes.append(note)
    work = replace(work, levers=replace(work.levers, compress=None))
    solved: dict[str, BlockFront] = {}
    variants = [with_levers(p, work.levers, work.checkpoint, work.figures, solved) for p in found.variants]
    try:
        best_schedule(variants, work.checkpoint, budget)
    except InfeasibleError as refused:
        raise InfeasibleError(f"{refused} Here {note}.", binding=refused.binding, nearest=refused.nearest) from error
    return work, replace(found, variants=variants)


def frontier_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, goal: Goal, target: str | Target = AUTO, points: int = 20,
    passes: Sequence[str] | None = None, loss: Loss | None = None, keep_outputs: bool = False, progress: Progress = QUIET,
) -> list[Plan]:  # fmt: skip
    """Predicted plans for budgets from the least feasible to the unlimited one, none both larger and slower than another."""
    work = _work(model, args, kwargs, goal, target, passes, loss, progress)
    found = work.prepare(work.capture(keep_outputs))
    with progress.step("solve for every budget"):
        solved = [s for prepared in found.variants for s in frontier(prepared, work.checkpoint, points)]
    front: list[Schedule] = []
    for s in sorted(solved, key=lambda s: (s.trace.peak_bytes, s.seconds)):
        if not front or s.seconds < front[-1].seconds:
            front.append(s)
    thinned = front if len(front) <= points else [front[round(i * (len(front) - 1) / (points - 1))] for i in range(points)]
    return [build_plan(s, [], found, work.figures, replace(goal, memory=s.trace.peak_bytes), work.notes) for s in thinned]


def _work(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], goal: Goal, target: str | Target,
    passes: Sequence[str] | None, loss: Loss | None, progress: Progress,
) -> Work:  # fmt: skip
    checkpoint, heads, pointwise = load_training_passes(passes)
    machine = resolve(target, [])
    notes = list(machine.keep_timings())
    # A link is used without asking only in plans for other machines: copies beside the compute have not run on this one.
    levers = load_levers(passes, linked=not machine.here and machine.target.device != "cpu" and machine.target.link_bandwidth > 0)
    if levers.compress is not None and goal.exact:
        notes.append("compress is not proposed: it changes gradients, and the goal allows no error. Give max_error, e.g. 0.02.")
        levers = replace(levers, compress=None)
    figures = Figures(target=machine.target, here=machine.here, known=known_figures() if machine.here else {})
    return Work(
        model=model, args=args, kwargs=kwargs, goal=goal, loss=loss, checkpoint=checkpoint, heads=heads, pointwise=pointwise,
        attention=load_attention(passes), figures=figures, levers=levers, progress=progress, notes=notes,
    )  # fmt: skip


def _verified(work: Work, prepared: Prepared, runner: StepRunner, plan: Plan) -> tuple[TrainingExecutable, int]:
    """The planned model with what was verified and measured in its plan; bytes that the allocator was above the budget.

    Raises:
        VerificationError: loss or gradients differ from the model's own by more than rounding.
    """
    step = lambda: runner.loss(work.args, work.kwargs)  # noqa: E731
    with work.progress.step("run the planned step"), host_use(plan, prepared) as used:
        found = verify.run(step, work.model)
    plan = replace(plan, notes=(*(n for n in plan.notes if not n.startswith(MEASURED)), *used))
    base = prepared.cut.given_bytes
    peak = None if found.peak_bytes is None else base + found.peak_bytes
    excess = 0 if peak is None or plan.goal.memory is None else peak - plan.goal.memory
    reason = verify.room_for(plan.baseline.peak_bytes or 0)
    if reason is not None:
        notes = (*plan.notes, f"not compared with the unplanned step: {reason}")
        measured = Totals(seconds=None, peak_bytes=peak)
        return planned(work.model, runner, replace(plan, measured=measured, notes=notes)), excess
    with work.progress.step("run the original step"):
        wanted = verify.run(work.eager_loss, work.model)
    compressed = uses_compression(plan)
    check = verify.compare_whole(found, wanted, work.goal.tolerance) if compressed else verify.compare(found, wanted, work.goal.max_error)
    if compressed and not check.passed:
        raise TooCoarseError(f"the whole gradient's relative error was {check.error:.2e}, above the goal's {check.limit:.2e}")
    if not check.passed:
        raise VerificationError(
            f"The planned step differs from the model's own: {check.note}, relative error {check.error:.3e} > {check.limit:.3e}. "
            "Please report it; --pass no-loss_head may help."
        )
    del found
    with work.progress.step("measure"):
        ours, eager = _timed(step, work)
    plan = replace(
        plan,
        checks=(check,),
        measured=Totals(seconds=ours, peak_bytes=peak, error=check.error),
        measured_baseline=Totals(seconds=eager, peak_bytes=None if wanted.peak_bytes is None else base + wanted.peak_bytes, error=0.0),
    )
    return planned(work.model, runner, plan), excess


def _timed(step: Callable[[], torch.Tensor], work: Work) -> tuple[float, float]:
    """Seconds of the planned and of the original step, run in turn: the fastest of each."""
    samples: dict[str, list[float]] = {"ours": [], "eager": []}
    start = perf_counter()
    while not samples["eager"] or (perf_counter() - start < _TIMING_SECONDS and len(samples["eager"]) < 10):
        for name, run in (("ours", step), ("eager", work.eager_loss)):
            samples[name].append(verify.seconds(run, work.model))
    return min(samples["ours"]), min(samples["eager"])


def _reapply(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: Plan, passes: Sequence[str] | None, loss: Loss | None,
    keep_outputs: bool, progress: Progress,
) -> TrainingExecutable:  # fmt: skip
    """Carry out a saved plan: nothing is solved; it is simulated, verified and measured again."""
    work = _work(model, args, kwargs, plan.goal, AUTO, passes, loss, progress)
    option, chunks = plan.schedule.get("loss_head"), plan.schedule.get("chunks")
    heads = replace(work.heads, chunks=chunks) if work.heads is not None and isinstance(chunks, int) and option != "whole" else work.heads
    lazy = _NoOptions(points=work.checkpoint.points, groups=work.checkpoint.groups)
    step = work.capture(keep_outputs)
    if plan.schedule.get("attention", WRITTEN) == WRITTEN:
        step = replace(step, fused=None)
    known = fingerprint(step.step) == plan.fingerprint
    found = replace(work, heads=heads, checkpoint=lazy).prepare(step, unfused(plan.schedule)) if known else None
    wanted = (option, plan.schedule.get("in_place"), plan.schedule.get("attention", WRITTEN) == FUSED)
    variants = found.variants if found else []
    prepared = next((p for p in variants if (p.variant.option, p.variant.in_place, p.variant.fused_attention) == wanted), None)
    if prepared is None:
        raise FormatError(
            f"This plan was made for another model or other shapes: its step has the fingerprint {plan.fingerprint}. "
            "Plan this one anew, without --plan."
        )
    emitted, trace = restored(prepared, plan.schedule)
    if plan.goal.memory is not None and trace.peak_bytes > plan.goal.memory:
        raise FormatError(
            f"The plan's schedule would peak at {format_bytes(trace.peak_bytes)}, above its budget of {format_bytes(plan.goal.memory)}: "
            "it was changed, or made by another version. Plan again."
        )
    fresh = replace(plan, checks=(), measured=None, measured_baseline=None)
    return _verified(work, prepared, StepRunner(model, prepared.step, emitted), fresh)[0]


class _NoOptions(Checkpoint):
    """For applying a plan: nothing is chosen, so no block is solved."""

    def front(self, block: Any) -> BlockFront:
        return BlockFront(options=(), found=0, complete=False, proven=False, solver="", seconds=0.0)
