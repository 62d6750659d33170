"""The whole path: capture, propose, solve, apply, lower, verify, measure, choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from torch import nn

from effcompile.backends import usable_backends
from effcompile.backends.base import Backend
from effcompile.compiler import measure
from effcompile.compiler.another_machine import carried_out_here
from effcompile.compiler.borne_out import confirmed, stale_timings
from effcompile.compiler.settle import Outcome, Workshop, as_saved, let_go, settle, settle_all
from effcompile.core import effort, gpu
from effcompile.core.errors import (
    EffcompileError,
    FormatError,
    InternalError,
    LoweringError,
    UsageError,
    VerificationError,
)
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.estimate.rehearse import Rehearsal
from effcompile.ir.figures import Candidate
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.room import Room, device_of
from effcompile.passes import Pass, load_passes, optional_in
from effcompile.proof.alike import inputs_alike
from effcompile.proof.verify import references, stress_references, stressed, worst
from effcompile.runtime.executable import Executable
from effcompile.runtime.inputs import GraphInputs
from effcompile.search import captured
from effcompile.search.bound import overtaken
from effcompile.search.machine import Machine, resolve
from effcompile.search.pricing import (
    backends_for,
    generated,
    measured_options,
    plans_for,
    ranged,
    replaced_weights,
    search_for,
    standing_in,
    summing,
)
from effcompile.search.progress import entry
from effcompile.search.raced import Race
from effcompile.search.request import Asked, Task
from effcompile.search.search import Search, fingerprint
from effcompile.search.shortlist import SHORTLIST, not_built, undecided, worth_building
from effcompile.sites.parts import attentions


@entry("plan")
def make_plan(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The best plan, predicted and certified; nothing is lowered. Arguments as in Request.

    Raises:
        CaptureError, InputsError: the model cannot be captured. InfeasibleError: no plan meets the goal.
    """
    search, plans, candidates = _priced(Task.of(model, args, kwargs, asked))
    best, guards = plans[0][1], GraphInputs(search.program).guards()
    return replace(
        best, candidates=tuple(candidates), guards=guards, notes=(*best.notes, *search.machine.keep_timings())
    )


@entry("optimize")
def optimize(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Executable:
    """Plan, lower, verify and measure; returns the fastest (or smallest) result that is within the goal.

    Arguments as in Request.

    Raises:
        CaptureError, InputsError: the model cannot be captured. InfeasibleError: no plan meets the goal.
        VerificationError: no backend's result is within the goal. LoweringError: none could be built.
    """
    task = Task.of(model, args, kwargs, asked)
    _inference_only(task.request.goal)
    if task.request.plan is not None:
        return _reapply(task, task.request.plan)
    place = gpu.place_of(model, args, kwargs)
    backends, absent = backends_for(task.request.target, task.request.backend, place)
    machine = resolve(task.request.target, backends, place)
    best_of = partial(_best_of, task, machine, backends, absent)
    program, checked = captured.verified(task)
    try:
        best = best_of(program)
    except (VerificationError, LoweringError, InternalError) as failure:
        if program.left == captured.LEFT_AS_WRITTEN or not attentions(program):
            raise
        try:
            best = best_of(captured.as_written(task))
        except EffcompileError:
            raise failure from None
        checked = (*checked, Because("attention is left as written: {name}", (str(failure),)))
    notes = (
        *best.plan.notes,
        *checked,
        *stale_timings(machine, best.plan.candidates),
        *machine.keep_timings(),
    )
    plan = carried_out_here(replace(best.plan, notes=tuple(dict.fromkeys(notes))), place)
    return Executable(model, best.program, best.lowered, plan)


@entry("frontier")
def frontier(
    model: nn.Module, args: Args, kwargs: Kwargs, *, points: int = 8, **asked: Unpack[Asked]
) -> list[Plan]:
    """Predicted plans along the memory-time Pareto front of the best backend, least memory first.

    Arguments as in Request.
    """
    search, plans, _ = _priced(Task.of(model, args, kwargs, asked))
    found = search.frontier(plans[0][0], points)
    search.machine.keep_timings()
    return found


def _inference_only(goal: Goal) -> None:
    if goal.mode != "inference":
        raise UsageError(
            "mode = 'training' is not built yet: this release plans and lowers inference. Use mode = "
            "'inference'."
        )


def _priced(task: Task) -> tuple[Search, list[tuple[Backend, Plan]], list[Candidate]]:
    """The best plan of each backend, on a machine that may be another one."""
    asked = task.request
    _inference_only(asked.goal)
    place = gpu.place_of(task.model, task.args, task.kwargs)
    backends, absent = backends_for(asked.target, asked.backend, place, lowered=False)
    machine = resolve(asked.target, backends, place)
    program = captured.in_normal_form(task)
    backends = backends if machine.here else standing_in(backends, program, asked.goal)
    search = search_for(program, asked.goal, machine, load_passes(asked.passes), asked.progress, backends)
    return search, *plans_for(search, backends, absent, asked.progress)


def _best_of(
    task: Task, machine: Machine, backends: list[Backend], absent: dict[str, Reason], program: Program
) -> Outcome:
    """The best result of a program.

    Raises:
        EffcompileError: no backend's result is within the goal, or none could be planned or built.
    """
    asked = task.request
    search = search_for(program, asked.goal, machine, load_passes(asked.passes), asked.progress, backends)
    race = Race.of(search, *plans_for(search, backends, absent, asked.progress))
    plans, here = list(race.plans), backends if machine.here else ()
    shop = _workshop(task, program, search.passes, asked.goal, here, plans[0][1].baseline.seconds)
    try:
        outcomes, told = _settle_all(shop, search, plans, race.candidates)
    except EffcompileError:
        if not (late := overtaken(search, backends, race.candidates, math.inf)):
            raise
        plans += late
        outcomes, told = _settle_all(shop, search, late, race.candidates)

    def measured() -> Outcome:
        best = _finish(shop, outcomes, told)
        if not machine.here or effort.is_low() or asked.goal.minimize != "time":
            return best
        if undecided(plans, told, race.took(best.plan)):
            best = _finish(shop, outcomes, told)  # a second look takes a fraction of a build
        late = undecided(plans, told, took := race.took(best.plan))
        if late := [*late, *overtaken(search, backends, told, took)]:
            outcomes[:], told[:] = _settle_all(shop, search, late, told, before=outcomes, beside=took)
            best = _finish(shop, outcomes, told)
        race.keep(best.plan, [*plans, *late])
        return best

    def solved_again() -> Outcome:
        _rest(outcomes)
        if Room.of(device_of(task.model), (size := program.weight_bytes()), size).left() < size:
            # timing linears takes weights, too
            outcomes.clear()
            let_go(program)
        again = replace(search, machine=machine.priced_anew(backends), _proposals={})
        solved, considered = plans_for(again, backends, absent, asked.progress)
        outcomes[:] = [
            built for built in outcomes if any(built.plan.same_choices(plan) for _, plan in solved)
        ]
        return _finish(shop, *_settle_all(shop, again, solved, considered, outcomes))

    def rebuilt(plan: Plan) -> Outcome:
        backend = next(each for each in backends if each.name == plan.backend)
        built = next((each for each in outcomes if plan.same_choices(each.plan)), None) or settle(
            shop, backend, plan.unmeasured, None
        )
        return replace(built, plan=replace(plan, settings=built.plan.settings))

    return _stressed(shop, confirmed(measured, solved_again, rebuilt) if machine.here else measured())


def _workshop(
    task: Task,
    program: Program,
    passes: tuple[Pass, ...],
    goal: Goal,
    backends: Sequence[Backend],
    seconds: float | None,
) -> Workshop:
    """What every round needs: inputs, what the model returns for them, and what it is called by. `seconds`:
    of a call of the model, as predicted.
    """
    model, progress = task.model, task.request.progress
    inputs = list(program.calibration) or ([] if goal.exact else generated(program))
    seen = ranged(program, goal, inputs)
    flat = [program.flat_inputs(args, kwargs) for args, kwargs in seen] or [program.flat_inputs()]
    with progress.step("reference outputs"):
        kin = [] if goal.exact else inputs_alike(program, seconds)
        cases = references(program, model, goal, inputs, kin)
        stress = stress_references(program, model, goal)
    rehearsal = Rehearsal(
        program, measured_options(passes), replaced_weights(passes, program), flat, summing(backends)
    )
    return Workshop(
        model=model, program=program, passes=passes, goal=goal, cases=cases, calibration=flat,
        rehearsal=rehearsal, stress=stress, progress=progress,
    )  # fmt: skip


def _stressed(shop: Workshop, best: Outcome) -> Outcome:
    """The outcome with its error under stress inputs, for which the goal promises nothing."""
    run = Executable(shop.model, best.program, best.lowered, best.plan)
    return replace(best, plan=replace(best.plan, stress=stressed(run, best.program, shop.stress, shop.goal)))


def _settle_all(
    shop: Workshop,
    search: Search,
    plans: list[tuple[Backend, Plan]],
    candidates: Sequence[Candidate],
    built: Sequence[Outcome] = (),
    before: Sequence[Outcome] = (),
    beside: float = 0.0,
) -> tuple[list[Outcome], list[Candidate]]:
    """Lower and verify every backend on the shortlist; a backend that fails is told and passed over while
    another works.

    `built`: outcomes of an earlier solve, which are taken where the plan is still the same. `before`: those
    of other backends, of which the best took `beside` seconds: what may be as fast is built, too.

    Raises:
        EffcompileError: all failed; the first one's error.
    """

    def settled(backend: Backend, plan: Plan, outcomes: Sequence[Outcome]) -> Outcome | Reason:
        on_cpu = search.machine.target.device == "cpu"
        worth = worth_building(backend, outcomes, SHORTLIST, beside) if on_cpu else math.inf
        if plan.certificate.objective > worth:
            return not_built(plan, outcomes)
        if (same := next((each for each in built if plan.same_choices(each.plan)), None)) is not None:
            return replace(same, plan=_priced_again(same.plan, plan))
        _rest(outcomes)
        return settle(shop, backend, plan, partial(search.plan_for, backend), worth_building=worth)

    return settle_all(plans, candidates, settled, before)


def _rest(outcomes: Sequence[Outcome]) -> None:
    for each in outcomes:
        each.lowered.rest()


def _priced_again(built: Plan, plan: Plan) -> Plan:
    """A plan that was built, with the figures and the proof of another solve with the same choices."""
    applied = {d.site: d.applied for d in built.decisions}
    decisions = tuple(replace(d, applied=applied.get(d.site, d.applied)) for d in plan.decisions)
    return replace(
        built, decisions=decisions, declined=plan.declined, certificate=plan.certificate,
        predicted=plan.predicted, baseline=plan.baseline,
    )  # fmt: skip


def _finish(shop: Workshop, outcomes: Sequence[Outcome], candidates: Sequence[Candidate]) -> Outcome:
    """Time the original and all outcomes in turn; the best one, its plan with what was measured."""
    program, model = shop.program, shop.model
    # what lowering and verifying left, before the original and all outcomes are called in turn
    let_go(program)
    with shop.progress.step("measure"):
        seconds = measure.compare(program, model, outcomes)
        if shop.goal.minimize == "time":
            best = min(outcomes, key=lambda o: seconds[o.plan.backend])
        else:
            best = min(outcomes, key=lambda o: (o.lowered.weight_bytes, seconds[o.plan.backend]))
        errors = {outcome.plan.backend: worst(outcome.checks) for outcome in outcomes}
        # of what was built, which may be a milder plan than the first, or one that takes more of the error
        built = {outcome.plan.backend: outcome.plan for outcome in outcomes}
        told = tuple(
            replace(
                c,
                measured_seconds=seconds.get(c.backend),
                error=errors.get(c.backend),
                predicted_seconds=built[c.backend].predicted.seconds,
                note=None,
            )
            if c.backend in built
            else c
            for c in candidates
        )
        plan = replace(
            best.plan,
            candidates=told,
            measured=measure.totals(best, seconds, errors[best.plan.backend]),
            measured_baseline=measure.baseline_totals(program, model, seconds),
        )
    return replace(best, plan=plan)


def _reapply(task: Task, plan: Plan) -> Executable:
    """Carry out a saved plan: nothing is solved, everything is verified and measured again.

    Raises:
        FormatError: the plan was made for another model.
    """
    backends, _ = usable_backends(plan.backend)
    program, checked = captured.verified(task)
    if fingerprint(program) != plan.fingerprint:
        program = captured.as_written(task)
    if fingerprint(program) != plan.fingerprint:
        raise FormatError(
            f"This plan was made for another model: its graph has the fingerprint {plan.fingerprint}, "
            f"{program.name} has {fingerprint(program)}. Plan this model anew with `effcompile optimize` "
            "without --plan."
        )
    passes = load_passes((*(task.request.passes or ()), *optional_in(plan)))
    shop = _workshop(task, program, passes, plan.goal, backends, plan.baseline.seconds)
    outcome = settle(shop, backends[0], plan.unmeasured, None)
    best = _stressed(shop, _finish(shop, [outcome], [as_saved(plan)]))
    notes = tuple(dict.fromkeys((*best.plan.notes, *checked)))
    place = gpu.place_of(task.model, task.args, task.kwargs)
    made = carried_out_here(replace(best.plan, notes=notes), place)
    return Executable(task.model, best.program, best.lowered, made)
