"""Running what was planned: loss, gradients and updates against the model's own, the allocator's peak, and
times beside eager's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from effcompile.backends.torch.microbatch import MicrobatchRunner
from effcompile.backends.torch.optimizer import PlannedOptimizer, planned_optimizer
from effcompile.backends.torch.step_inputs import held
from effcompile.backends.torch.training import StepRunner
from effcompile.core.errors import VerificationError
from effcompile.core.findings import HostUse, Unmeasured
from effcompile.core.reasons import Because, Reason
from effcompile.core.units import format_seconds
from effcompile.ir.figures import Check, Totals
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.machine.room import NoRoomError, Room, device_of
from effcompile.ops.replaced_optimizer import put_in_place_of
from effcompile.passes.training.base import Case
from effcompile.passes.training.optimizer_ways import StatesOption
from effcompile.proof.digests import Digests
from effcompile.proof.spool import Spool
from effcompile.proof.training import on_device, updates, verify
from effcompile.proof.training.agreed import AGAIN, Proven
from effcompile.proof.training.alive import alive_bytes
from effcompile.proof.training.in_parts import eager_in_parts, inseparable, without_dropout
from effcompile.proof.training.kept import keep_times, known_times
from effcompile.proof.training.lean import products_in_fp32
from effcompile.proof.training.original import Original
from effcompile.proof.training.timed import timed
from effcompile.runtime.training import TrainingExecutable, planned
from effcompile.search.training.moved import RefutedError, host_use, too_coarse
from effcompile.search.training.prepare import Prepared
from effcompile.search.training.work import Work

#: What the original step takes of the system, in times of what is predicted: its optimizer's temporaries, and
#: gaps in the heap (measured).
_UNPLANNED = 1.25
_IN_FP32 = (
    "compared with the model's own step run leanly, its 16-bit products in fp32 and rounded once: "
    "here they are slow"
)
#: Seconds of an original step (predicted) that are waited for where a lean one is faster: it is run three
#: times.
_PATIENT = 60.0
#: Loss scales that are too small to be of use: an fp16 step that overflows still is given up.
_LEAST_SCALE = 2.0**-14


class Verified(NamedTuple):
    """The planned model with what was verified and measured in its plan.

    over: bytes that the allocator was above the budget. loss: the model's own, as `verify.run` ran it; None
    where it does not fit.
    """

    executable: TrainingExecutable
    over: int
    loss: torch.Tensor | None


def verified(
    work: Work,
    prepared: Prepared,
    runner: StepRunner,
    plan: Plan,
    reserved: int | None = None,
    originals: dict[bool, verify.Result] | None = None,
) -> Verified:
    """Run what was planned, and compare it with the model's own step.

    reserved: bytes that torch's allocator is foreseen to take of a GPU, where that is simulated.
    originals: whether it was run leanly → the model's own step, for all plans of one request: it is run once.

    Raises:
        VerificationError: loss, gradients or updates differ from the model's own by more than rounding.
        RefutedError: values in 8 bits, or products in 16, change the gradient by more than the goal allows;
            or the micro-batches' sum is not the whole batch's loss or gradient.
    """
    step = lambda: runner.loss(work.args, work.kwargs)  # noqa: E731
    states, division = prepared.case.states, prepared.case.division
    base, on_gpu = _alive(work, prepared, runner), device_of(work.model) == "cuda"
    room = Room.of(device_of(work.model), base, plan.goal.memory)
    room.tidy()  # what capture, pricing and the search left
    whole = plan.baseline.peak_bytes or 0
    refusal = room.refusal(int(_UNPLANNED * (whole - base)), whole) or _too_long(work, plan)
    proven = None if refusal is None else Proven.of(work, prepared, plan)
    # where an update is to be made of the gradients, too, their hashes are not enough
    hashed = proven is not None and proven.kept is not None and not originals and work.optimizer is None
    folder = prepared.cut.host.folder
    found, plan = _ran(work, prepared, runner, plan, Digests() if hashed else Spool(folder))
    held = None if proven is None or originals else proven.held(found)
    if hashed and held is None:  # they are others than that day: to be compared
        found, plan = _ran(work, prepared, runner, plan, Spool(folder))
    room.tidy()
    original = Original(work=work, case=prepared.case, folder=folder, room=room, refusal=refusal)
    wanted, loss, checks, notes = None, None, list[Check](), list[Reason]()
    try:
        if held is not None:
            checks, loss = held
            notes.append(AGAIN)
        else:
            wanted = original.once({} if originals is None else originals)
            checks, loss = _checked(original, plan, runner, found, wanted), wanted.loss
            if proven is not None:
                proven.keep(found, loss, checks)
        if refusal is not None and products_in_fp32(work.model):
            notes.append(Because(_IN_FP32))
    except NoRoomError as error:
        text = "not compared with the unplanned step: {name}; run leanly it {name}"
        text += "; that the micro-batches add up to it is read off the graph" if division is not None else ""
        notes.append(Because(text, (refusal or "it does not fit", str(error))))
    notes += _compare_updates(work, states, wanted or found, checks)
    room.tidy()
    theirs = None
    if refusal is None:  # the original first: planning may choose the given optimizer's fused kernels
        with work.progress.step("run the original step with its update"):
            theirs = _updated(work, None, work.eager_loss, None, wanted)
        room.tidy()
    with work.progress.step("run the planned step with its update"):
        run, lasting = partial(_updated, work, runner, step, states, found), base + prepared.cut.libraries
        ours, said = on_device.within(run, reserved, lasting) if on_gpu else (run(), [])
    notes += said
    room.tidy()
    with work.progress.step("time the steps"):
        together = wanted if refusal is None else None
        known = known_times(plan)
        expected = (known.planned, plan.predicted.seconds), (known.original, plan.baseline.seconds)
        foretold = ((), ()) if ours else expected
        seconds, eager_seconds = timed(work, runner, step, found, ours, together=together, foretold=foretold)
        keep_times(plan, seconds, eager_seconds or None)
    there = (
        states.resident_bytes
        if states is not None and work.optimizer is not None and work.optimizer.state
        else 0
    )
    peak = _peak(base + there, found, ours)  # an optimizer that has states already is not run
    measured = Totals(
        seconds=seconds + _update(ours), peak_bytes=peak, error=checks[0].error if checks else None
    )
    if on_gpu:
        notes += on_device.said(peak, found.reserved if ours is None else ours.reserved)
    plan = replace(plan, checks=tuple(checks), measured=measured, notes=(*plan.notes, *notes))
    if refusal is None and wanted is not None:
        before = Totals(
            seconds=eager_seconds + _update(theirs), peak_bytes=_peak(base + there, wanted, theirs), error=0.0
        )
        plan = replace(plan, measured_baseline=before)
    else:
        plan = replace(plan, notes=(*plan.notes, Unmeasured(because=refusal or "does not fit")))
    return Verified(_finished(work, runner, plan, states), excess(peak, plan.goal.memory), loss)


def _ran(
    work: Work, prepared: Prepared, runner: StepRunner, plan: Plan, gradients: Spool | Digests
) -> tuple[verify.Result, Plan]:
    """A planned step whose gradients are put aside; the plan says what it took of the host."""
    runner.sink, runner.guarded = gradients.put, False
    with work.progress.step("run the planned step"), host_use(plan, prepared) as used:
        found = _settled(
            lambda: verify.run(
                lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves, gradients
            ),
            runner,
            prepared.case,
            plan,
        )
    return found, replace(plan, notes=(*(n for n in plan.notes if not isinstance(n, HostUse)), *used))


def _settled(run: Callable[[], verify.Result], runner: StepRunner, case: Case, plan: Plan) -> verify.Result:
    """A step whose gradients are finite: where the loss is scaled, it is run until the scale has come down to
    what fits.

    Raises:
        RefutedError: the loss is not finite, or a gradient is not at any scale.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run()
        scale = runner.loss_scale
        while scale is not None and scale.overflowed and scale.scaler.get_scale() > _LEAST_SCALE:
            found = run()
    if scale is not None and (scale.overflowed or not bool(found.loss.isfinite())):
        what = (
            f"a gradient is not finite at a loss scale of {scale.scaler.get_scale():g}"
            if scale.overflowed
            else "the loss is not finite"
        )
        if (error := too_coarse(case, plan, f"it overflows: {what}")) is not None:
            raise error
    return found


def _too_long(work: Work, plan: Plan) -> str | None:
    """None, or why the original is run leanly though it fits: only there its products are not those that this
    machine is slow at.
    """
    seconds = plan.baseline.seconds or 0.0
    if seconds <= _PATIENT or not products_in_fp32(work.model):
        return None
    return f"takes about {format_seconds(seconds)} by its own 16-bit products"


def _alive(work: Work, prepared: Prepared, runner: StepRunner) -> int:
    """Bytes alive before a step, counted over the tensors that are there; the graph's constants, and codes,
    live in the runner.

    Frozen weights that are held as codes are there as they were given too, to be compared with: they go when
    the plan is taken up.
    """
    device, constants = device_of(work.model), [*prepared.step.constants.values(), *runner.codes]
    going = alive_bytes(device, [held(work.model, name) for name in prepared.step.coded])
    return alive_bytes(device, work.model, work.args, dict(work.kwargs), work.loss, constants) - going


def _checked(
    original: Original, plan: Plan, runner: StepRunner, found: verify.Result, wanted: verify.Result
) -> list[Check]:
    """The checks of loss and gradients.

    Where dropout draws other numbers for micro-batches than for the whole batch: the planned step against the
    model's own on the same micro-batches, and those against the whole batch where nothing is drawn.

    Raises:
        VerificationError: they differ by more than rounding. RefutedError: as in `verified`.
        NoRoomError: the original does not fit.
    """
    work = original.work
    if not isinstance(runner, MicrobatchRunner):
        return [_compared(original, plan, found, wanted)]
    try:
        if not runner.divided.random:
            return [_compared(original, plan, found, wanted)]
        name = "run the original step in micro-batches"
        apart = original.run(eager_in_parts(work, runner), name)
        with without_dropout():
            each, whole = (
                original.run(step, name) for step in (eager_in_parts(work, runner), work.eager_loss)
            )
        same = _passed(verify.compare(each, whole, work.goal.max_error))
        return [
            _compared(original, plan, found, apart),
            replace(same, name="micro-batches as the whole batch, without dropout"),
        ]
    except RefutedError:
        raise
    except VerificationError as error:
        raise inseparable(str(error)) from error


def _compared(original: Original, plan: Plan, found: verify.Result, wanted: verify.Result) -> Check:
    """Loss and gradients against eager's: the whole gradient where values are rounded, else each parameter's.

    Raises:
        VerificationError: they differ by more than rounding. RefutedError: by more than the goal allows, in 8
            or 16 bits.
    """
    work = original.work
    if too_coarse(original.case, plan, "") is None:
        truth = partial(original.truth, wanted, plan.baseline.peak_bytes or 0)
        return _passed(verify.compare(found, wanted, work.goal.max_error, truth))
    check = verify.compare_whole(found, wanted, work.goal.tolerance)
    said = f"the whole gradient's relative error was {check.error:.2e}, above the goal's {check.limit:.2e}"
    if not check.passed and (error := too_coarse(original.case, plan, said)) is not None:
        raise error
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


def _compare_updates(
    work: Work, states: StatesOption | None, wanted: verify.Result, checks: list[Check]
) -> list[Reason]:
    """Adds the check of the planned update, or returns the note on one that may differ."""
    if states is None or work.optimizer is None:
        return []
    found = updates.check(states, work.optimizer, work.model, wanted.gradients)
    if isinstance(found, Reason):
        return [found]
    checks.append(_passed(found))
    return []


def _updated(
    work: Work,
    runner: StepRunner | None,
    step: Callable[[], torch.Tensor],
    states: StatesOption | None,
    ran: verify.Result | None,
) -> updates.Steps | None:
    """Updates by the planned optimizer (`states`), or by the given one; without one, or where it has states
    already, None, or on a GPU the planned steps without their updates.

    ran: the same step before, whose gradients the first update may have; those of a scaled loss are not asked
    for twice.
    """
    given = work.optimizer
    steps = on_device.STEPS if runner is not None and device_of(work.model) == "cuda" else 2
    if given is None or given.state:
        if runner is None or steps == 2:
            return None
        runner.sink = lambda name, gradient: None
        return updates.repeated(step, work.model, work.leaves, steps - 1)
    scaled = runner is not None and runner.loss_scale is not None
    with updates.as_fresh(given):
        optimizer = given if states is None or runner is None else _made(work, runner, states)
        return updates.run(
            step, work.model, optimizer, runner, work.leaves,
            None if ran is None or scaled else ran.gradients, steps=steps,
        )  # fmt: skip


def _made(work: Work, runner: StepRunner, states: StatesOption) -> Optimizer:
    assert work.optimizer is not None
    consumes = frozenset(runner.consumed)
    return planned_optimizer(
        work.optimizer, states.form, on_host=states.on_host, consumes=consumes, model=work.model
    )


def _finished(work: Work, runner: StepRunner, plan: Plan, states: StatesOption | None) -> TrainingExecutable:
    """The planned model, with its optimizer fresh and bound to it."""
    optimizer = None if states is None else _made(work, runner, states)
    if optimizer is not None and work.optimizer is not None:
        put_in_place_of(work.optimizer, by=optimizer)
    if isinstance(optimizer, PlannedOptimizer):
        runner.sink, runner.updated = optimizer.consume, optimizer.by_name
    else:
        runner.sink, runner.updated = None, {}
    return planned(work.model, runner, plan, optimizer)


def _peak(base: int, found: verify.Result, whole: updates.Steps | None) -> int | None:
    """Bytes at the highest instant: of the whole step where it was run with its update."""
    peak = found.peak_bytes if whole is None else whole.peak_bytes
    return None if peak is None else base + peak


def _update(whole: updates.Steps | None) -> float:
    return 0.0 if whole is None else whole.update_seconds
