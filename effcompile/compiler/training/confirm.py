"""Running what was planned: loss, gradients and updates against the model's own, the allocator's peak, and times beside eager's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
from torch.optim import Optimizer

from effcompile.backends.torch.microbatch import MicrobatchRunner
from effcompile.backends.torch.optimizer import PlannedOptimizer, planned_optimizer
from effcompile.backends.torch.training import StepRunner
from effcompile.compiler.training import updates, verify
from effcompile.compiler.training.alive import alive_bytes
from effcompile.compiler.training.executable import TrainingExecutable, planned
from effcompile.compiler.training.microbatch import InseparableError, eager_in_parts, without_dropout
from effcompile.compiler.training.moved import MEASURED, TooCoarseError, host_use, rounds
from effcompile.compiler.training.precision import settled
from effcompile.compiler.training.prepare import Prepared
from effcompile.compiler.training.states import Parts
from effcompile.compiler.training.work import Work
from effcompile.core.errors import VerificationError
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Check, Plan, Totals
from effcompile.passes.training.states import StatesOption

#: Seconds that timing the step beside the original may take, once both have run.
_TIMING_SECONDS = 20.0


def verified(
    work: Work, prepared: Prepared, runner: StepRunner, plan: Plan, states: StatesOption | None = None, parts: Parts | None = None
) -> tuple[TrainingExecutable, int]:
    """The planned model with what was verified and measured in its plan; bytes that the allocator was above the budget.

    Raises:
        VerificationError: loss, gradients or updates differ from the model's own by more than rounding.
        TooCoarseError: values in 8 bits, or products in 16, change the gradient by more than the goal allows.
        InseparableError: the micro-batches' sum is not the whole batch's loss or gradient.
    """
    step = lambda: runner.loss(work.args, work.kwargs)  # noqa: E731
    runner.sink = verify.into_gradients(work.model)
    with work.progress.step("run the planned step"), host_use(plan, prepared) as used:
        found = settled(lambda: verify.run(step, work.model, work.leaves), runner)
    plan = replace(plan, notes=(*(n for n in plan.notes if not n.startswith(MEASURED)), *used))
    there = states.resident_bytes if states is not None and work.optimizer is not None and work.optimizer.state else 0
    base = _alive(work, prepared) + there  # an optimizer that has states already is not run
    reason = verify.room_for(plan.baseline.peak_bytes or 0)
    if reason is not None:
        ours = _updated(work, runner, step, states)
        peak = _peak(base, found, ours)
        rest = "; that the micro-batches add up to it is read off the graph" if parts else ""
        notes = (*plan.notes, f"not compared with the unplanned step: {reason}{rest}")
        return _finished(work, runner, replace(plan, measured=Totals(peak_bytes=peak), notes=notes), states), excess(peak, plan.goal.memory)
    with work.progress.step("run the original step"):
        wanted = verify.run(work.eager_loss, work.model, work.leaves)
    checks = _checked(work, plan, runner, parts, found, wanted)
    note = _compare_updates(work, states, wanted, checks)
    with work.progress.step("measure"):
        seconds, eager_seconds = _timed(step, work)
        theirs = _updated(work, None, work.eager_loss, None)  # first: planning may choose the given optimizer's fused kernels
        ours = _updated(work, runner, step, states)
    peak = _peak(base, found, ours)
    plan = replace(
        plan,
        checks=tuple(checks),
        measured=Totals(seconds=seconds + _update(ours), peak_bytes=peak, error=checks[0].error),
        measured_baseline=Totals(seconds=eager_seconds + _update(theirs), peak_bytes=_peak(base, wanted, theirs), error=0.0),
        notes=(*plan.notes, *note),
    )
    return _finished(work, runner, plan, states), excess(peak, plan.goal.memory)


def _alive(work: Work, prepared: Prepared) -> int:
    """Bytes alive before a step, counted over the tensors that are there; the graph's constants live in the runner."""
    constants = list(prepared.step.constants.values())
    return alive_bytes(verify.device_of(work.model), work.model, work.args, dict(work.kwargs), work.loss, constants)


def _checked(work: Work, plan: Plan, runner: StepRunner, parts: Parts | None, found: verify.Result, wanted: verify.Result) -> list[Check]:
    """The checks of loss and gradients.

    Where dropout draws other numbers for micro-batches than for the whole batch: the planned step against the model's own on the
    same micro-batches, and those against the whole batch without dropout.

    Raises:
        VerificationError: they differ by more than rounding. TooCoarseError, InseparableError: as in `verified`.
    """
    if parts is None or not isinstance(runner, MicrobatchRunner):
        return [_compared(work, plan, found, wanted)]
    try:
        if not parts.step.random:
            return [_compared(work, plan, found, wanted)]
        with work.progress.step("run the original step in micro-batches"):
            apart = verify.run(eager_in_parts(work, runner), work.model)
            with without_dropout(work.model):
                each, whole = (verify.run(step, work.model, work.leaves) for step in (eager_in_parts(work, runner), work.eager_loss))
        same = _passed(verify.compare(each, whole, work.goal.max_error))
        return [_compared(work, plan, found, apart), replace(same, name="micro-batches as the whole batch, without dropout")]
    except TooCoarseError:
        raise
    except VerificationError as error:
        raise InseparableError(str(error)) from error


def _compared(work: Work, plan: Plan, found: verify.Result, wanted: verify.Result) -> Check:
    """Loss and gradients against eager's: the whole gradient where values are rounded, else each parameter's.

    Raises:
        VerificationError: they differ by more than rounding. TooCoarseError: by more than the goal allows, in 8 or 16 bits.
    """
    if not rounds(plan):
        return _passed(verify.compare(found, wanted, work.goal.max_error))
    check = verify.compare_whole(found, wanted, work.goal.tolerance)
    if not check.passed:
        raise TooCoarseError(f"the whole gradient's relative error was {check.error:.2e}, above the goal's {check.limit:.2e}")
    return check


def _passed(check: Check) -> Check:
    """The check, if it passed.

    Raises:
        VerificationError: it did not.
    """
    if not check.passed:
        raise VerificationError(
            f"The planned step differs from the model's own: {check.note or check.name}, relative error "
            f"{check.error:.3e} > {check.limit:.3e}. Please report it; --pass no-loss_head may help."
        )
    return check


def _compare_updates(work: Work, states: StatesOption | None, wanted: verify.Result, checks: list[Check]) -> list[str]:
    """Adds the check of the planned update, or returns the note on one that may differ."""
    if states is None or work.optimizer is None:
        return []
    found = updates.check(states, work.optimizer, work.model, wanted.gradients)
    if isinstance(found, str):
        return [found]
    checks.append(_passed(found))
    return []


def _updated(work: Work, runner: StepRunner | None, step: Callable[[], torch.Tensor], states: StatesOption | None) -> updates.Steps | None:
    """Whole steps with the planned optimizer (`states`), or with the given one; None without one, or where it has states already."""
    given = work.optimizer
    if given is None or given.state:
        return None
    optimizer = given if states is None or runner is None else _made(work, runner, states)
    try:
        return updates.run(step, work.model, optimizer, runner, work.leaves)
    finally:
        given.state.clear()


def _made(work: Work, runner: StepRunner, states: StatesOption) -> Optimizer:
    assert work.optimizer is not None
    consumes = frozenset(runner.consumed)
    return planned_optimizer(work.optimizer, states.form, on_host=states.on_host, consumes=consumes, model=work.model)


def _finished(work: Work, runner: StepRunner, plan: Plan, states: StatesOption | None) -> TrainingExecutable:
    """The planned model, with its optimizer fresh and bound to it."""
    optimizer = None if states is None else _made(work, runner, states)
    runner.sink = optimizer.consume if isinstance(optimizer, PlannedOptimizer) else None
    return planned(work.model, runner, plan, optimizer)


def _peak(base: int, found: verify.Result, whole: updates.Steps | None) -> int | None:
    """Bytes at the highest instant: of the whole step where it was run with its update."""
    peak = found.peak_bytes if whole is None else whole.peak_bytes
    return None if peak is None else base + peak


def _update(whole: updates.Steps | None) -> float:
    return 0.0 if whole is None else whole.update_seconds


def _timed(step: Callable[[], torch.Tensor], work: Work) -> tuple[float, float]:
    """Seconds of the planned and of the original step, run in turn: the fastest of each."""
    samples: dict[str, list[float]] = {"ours": [], "eager": []}
    start = perf_counter()
    while not samples["eager"] or (perf_counter() - start < _TIMING_SECONDS and len(samples["eager"]) < 10):
        for name, run in (("ours", step), ("eager", work.eager_loss)):
            samples[name].append(verify.seconds(run, work.model, work.leaves))
    return min(samples["ours"]), min(samples["eager"])
