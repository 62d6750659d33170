"""The whole path of a generation: capture a step, price both regimes, solve, lower, compare by teacher
forcing, measure, choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from effcompile.backends import usable_for_steps
from effcompile.backends.base import Backend, Lowered
from effcompile.backends.torch.packed_before import Packed, keeping
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.capture.images import forgetting
from effcompile.compiler.another_machine import carried_out_here
from effcompile.compiler.generation.lower import lower_step
from effcompile.compiler.settle import as_saved, held_to_less, not_within, settle_all
from effcompile.core import gpu
from effcompile.core.errors import FormatError, VerificationError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason
from effcompile.core.types import Args, HFModel, Kwargs
from effcompile.core.units import format_bytes
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.figures import Candidate
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.passes import Choice, Declined, Pass, load_passes, optional_in
from effcompile.passes.speculate import drafts_in, drafts_tried, without_drafts
from effcompile.proof.generation import measured
from effcompile.proof.generation.check import Told, checks, told_by
from effcompile.proof.generation.speculation import speculated
from effcompile.proof.verify import worst
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import CacheRoom, LoweredStep
from effcompile.search.corrected import corrected
from effcompile.search.generation.calls import call_seconds
from effcompile.search.generation.errors import option_errors
from effcompile.search.generation.held import cache_choices, forms_of, held_in, narrowest
from effcompile.search.generation.in_place import RUNTIME, in_place_choices
from effcompile.search.generation.regimes import regimes_of
from effcompile.search.generation.room import fitting, largest_context
from effcompile.search.generation.seen import texts_to_measure
from effcompile.search.generation.sight import Sight, check_images, planned_images, sight_of
from effcompile.search.generation.text import CalibrationText, longest_source
from effcompile.search.machine import Machine, resolve
from effcompile.search.pricing import formats, measured_options, plans_for, steps_elsewhere
from effcompile.search.progress import Progress, entry
from effcompile.search.refine import Constraints, refine
from effcompile.search.regimes import Regimes
from effcompile.search.request import Asked, Task
from effcompile.search.search import Search, fingerprint, stored_notes
from effcompile.search.shortlist import may_hold_less, not_built, undecided, worth_building

#: What decides about it unless passes are named.
PASSES = ("rows", "quantize")
#: And about an encoder before it, where an error is allowed: its calls have many rows.
OF_ENCODERS = ("attention", "quantize")
#: Tokens of a prompt that are prefilled at once: longer ones in chunks of so many.
CHUNK = 512
#: Solves until the measured error and peak are within the limits.
_ROUNDS = 4
#: Times the best predicted objective that is still built and timed: of two backends' predictions one was up
#: to 1.2 times as far from what was measured as the other.
SHORTLIST = 1.25


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What carrying out a plan needs. `said`: where the texts are from. `before`: passes of an encoder.
    `sight`: images of the prompt.
    """

    model: HFModel
    step: GenerationStep
    goal: Goal
    passes: tuple[Pass, ...]
    before: tuple[Pass, ...]
    room: CacheRoom
    texts: tuple[CalibrationText, ...]
    said: str
    progress: Progress
    sight: Sight | None

    def told(self) -> Sequence[Told]:
        """What the model itself says to the texts."""
        with self.progress.step("reference outputs"):
            return told_by(self.model, self.texts, self.goal)


@dataclass(frozen=True, kw_only=True)
class Shop:
    """What deciding needs beside it, for every backend and every round."""

    bench: Bench
    machine: Machine
    sensitivity: Sensitivity
    beside: tuple[Choice, ...]
    own: Mapping[str, tuple[Choice | Declined, ...]]
    regimes: Regimes

    def search(self) -> Search:
        """What may be decided, priced."""
        step, goal, passes, sight = self.bench.step, self.bench.goal, self.bench.passes, self.bench.sight
        seen = planned_images(sight)
        program, options = step.program, {} if goal.exact else measured_options(passes)
        small = replace(step, layout=narrowest(step.layout, self.beside))
        return Search(
            program=program, regimes=self.regimes, goal=goal, machine=self.machine, passes=passes,
            sensitivity=self.sensitivity, calibration_inputs=self.bench.said,
            notes=(
                *self.machine.notes, *stored_notes(program), *program.mends, *(sight.said if sight else ()),
            ),
            formats=formats(options), beside=self.beside, own=self.own,
            explained=lambda error: largest_context(error, small, goal, CHUNK, seen),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A lowered plan within its limits."""

    plan: Plan
    lowered: LoweredStep
    parts: dict[str, Lowered]


@entry("optimize")
@forgetting
def optimize_generation(
    model: HFModel, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]
) -> GenerationExecutable:
    """Plan, lower, compare and measure a Hugging Face model for generation.

    Arguments as in Request; inputs serve as calibration text.

    Raises:
        UsageError: no Hugging Face model, a context that it has no positions for, or no backend that takes
            it.
        CaptureError: it cannot be captured.
        InfeasibleError: no plan meets the goal. VerificationError: no backend's result is within it.
    """
    task = Task.of(model, args, kwargs, asked)
    if task.request.plan is not None:
        return _reapply(task, task.request.plan)
    backends = usable_for_steps(task.request.backend)
    shop = _shop(task, backends)
    bench, told = shop.bench, shop.bench.told()
    search = shop.search()
    plans, candidates = plans_for(search, backends, {}, bench.progress)
    outcomes, considered = settle_all(plans, candidates, partial(_settle, bench, search, told))
    made = _finished(bench, outcomes, considered, shop.machine)
    beside = made.plan.seconds_measured
    late = undecided(plans, considered, beside)
    if made.plan.goal.minimize == "memory":
        late, beside = may_hold_less(plans, considered, made.plan), math.inf
    if late:
        settled = partial(_settle, bench, search, told, beside=beside)
        made = _finished(bench, *settle_all(late, considered, settled, outcomes), shop.machine)
    return made


def _finished(
    bench: Bench,
    outcomes: Sequence[Generated],
    candidates: Sequence[Candidate],
    machine: Machine | None = None,
) -> GenerationExecutable:
    """Time the original and all outcomes in turn, take the best, and complete its plan with what was
    measured.
    """
    goal = bench.goal
    with bench.progress.step("measure"):
        steps = {o.plan.backend: o.lowered for o in outcomes}
        found = measured.compared(bench.model, steps, goal, longest_source(bench.texts), bench.sight)
    totals = {o.plan.backend: found.each[o.plan.backend].total(goal) for o in outcomes}
    small = lambda outcome: outcome.plan.measured.peak_bytes or 0  # noqa: E731
    best = min(outcomes, key=small if goal.minimize == "memory" else lambda o: totals[o.plan.backend])
    plan = measured.told(
        best.plan, found, best.plan.backend, goal, best.lowered, best.parts, bench.step.program, bench.sight
    )
    notes = (*plan.notes, *(machine.keep_timings() if machine is not None else ()))
    plan = replace(
        plan,
        candidates=tuple(replace(c, measured_seconds=totals.get(c.backend)) for c in candidates),
        notes=notes,
    )
    plan = carried_out_here(plan, gpu.place_of(bench.model))
    return _speculating(bench, GenerationExecutable(bench.model, bench.step, best.lowered, plan, best.parts))


def _speculating(bench: Bench, executable: GenerationExecutable) -> GenerationExecutable:
    """With as many drafts a step as are fastest, where they are asked for; a saved plan's own number is kept,
    and measured again.
    """
    tried, saved = drafts_tried(bench.passes), drafts_in(executable.plan)
    if not tried:
        return executable
    plan = without_drafts(executable.plan)
    executable.plan = plan
    with bench.progress.step("measure drafts"):
        found = speculated(
            executable,
            [text.tokens for text in bench.texts],
            bench.goal,
            (saved,) if saved else tried,
            keep=bool(saved),
        )
    plan = replace(plan, declined=(*plan.declined, *found.declined))
    if (taken := found.decision) is not None:
        notes = (*plan.notes, *filter(None, [taken.why]))
        plan = replace(plan, decisions=(*plan.decisions, taken), notes=notes)
    executable.plan = plan
    return executable


def _reapply(task: Task, plan: Plan) -> GenerationExecutable:
    """Carry out a saved plan: nothing is solved, everything is compared and measured again.

    Raises:
        FormatError: the plan was made for another model. VerificationError: it is not within its limits here.
    """
    bench = _bench(task, plan.goal, optional_in(plan))
    if (found := fingerprint(bench.step.program)) != plan.fingerprint:
        raise FormatError(
            f"This plan was made for another model: its graph has the fingerprint {plan.fingerprint}, "
            f"{bench.step.program.name} has {found}. Plan this model anew, without `plan`."
        )
    (backend,) = usable_for_steps(plan.backend)
    check_images(plan, bench.sight)
    outcome, peak = _lowered(bench, backend, plan.unmeasured, bench.told())
    if not all(check.passed for check in outcome.plan.checks):
        raise not_within(backend.name, outcome.plan.checks)
    if excess(peak, plan.goal.memory):
        raise VerificationError(
            f"The plan's {backend.name} result holds {format_bytes(peak)} here, above its memory of "
            f"{format_bytes(plan.goal.memory or 0)}. Plan this model anew, without `plan`."
        )
    return _finished(bench, [outcome], [as_saved(plan)])


@entry("plan")
@forgetting
def plan_generation(model: HFModel, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The best predicted plan; nothing is lowered. Raises what `optimize_generation` does."""
    task = Task.of(model, args, kwargs, asked)
    backends = _planned_for(task)
    shop = _shop(task, backends)
    return plans_for(shop.search(), backends, {}, shop.bench.progress)[0][0][1]


@entry("frontier")
@forgetting
def frontier_generation(
    model: HFModel, args: Args, kwargs: Kwargs, *, points: int = 8, **asked: Unpack[Asked]
) -> list[Plan]:
    """Predicted plans along the memory-time Pareto front of the best backend, least memory first; each holds
    the cache of the whole context. Raises what `optimize_generation` does.
    """
    task = Task.of(model, args, kwargs, asked)
    backends = _planned_for(task)
    shop = _shop(task, backends)
    search = shop.search()
    plans, _ = plans_for(search, backends, {}, shop.bench.progress)
    return search.frontier(plans[0][0], points)


def _planned_for(task: Task) -> list[Backend]:
    """Those that a plan alone may be for. Raises what `usable_for_steps` does."""
    request = task.request
    elsewhere = steps_elsewhere(request.target, gpu.place_of(task.model), request.backend)
    return elsewhere or usable_for_steps(request.backend)


def _bench(task: Task, goal: Goal, named: Sequence[str] = ()) -> Bench:
    """The captured step, with the texts that results are compared on.

    `named`: passes beside those that were asked for.
    """
    model: HFModel = task.model
    progress = task.request.progress
    context, _, _ = goal.tokens
    fitting(model, context)
    with progress.step("capture"):
        step = capture_step(model)
    given = list(task.request.calibration or ()) or (
        [(task.args, task.kwargs)] if task.args or task.kwargs else None
    )
    with progress.step("calibration text"):
        texts, said = texts_to_measure(model, step, given, context)
        sight = sight_of(model, step, given, goal)
        step = replace(step, eye=sight.program if sight else None)
    asked = (*(task.request.passes or ()), *named)
    before = tuple(each for each in load_passes(asked, OF_ENCODERS) if each.name in OF_ENCODERS)
    return Bench(
        model=model, step=step, goal=goal, passes=load_passes(asked, PASSES),
        before=() if goal.exact or step.encoder is step.eye is None else before,
        room=CacheRoom(context=context, chunk=CHUNK), texts=tuple(texts), said=said, progress=progress,
        sight=sight,
    )  # fmt: skip


def _shop(task: Task, backends: list[Backend]) -> Shop:
    """Captured and priced."""
    bench = _bench(task, task.request.goal)
    step, goal, texts = bench.step, bench.goal, bench.texts
    machine = resolve(task.request.target, backends, gpu.place_of(task.model))
    with bench.progress.step("measure sensitivity"):
        found = option_errors(step, goal, (*bench.passes, *bench.before), texts, backends)
        called = call_seconds(step, bench.model, goal) if machine.here else 0.0
        beside = cache_choices(step, bench.model, goal, machine.target, texts, CHUNK)
        own = {RUNTIME: in_place_choices(step, goal, machine, backends, CHUNK)}
    return Shop(
        bench=bench, machine=machine, sensitivity=found, beside=beside, own=own,
        regimes=regimes_of(step, goal, CHUNK, longest_source(texts), bench.before, called, bench.sight),
    )  # fmt: skip


def _settle(
    bench: Bench, search: Search, told: Sequence[Told], backend: Backend, first: Plan,
    built: Sequence[Generated], beside: float = 0.0,
) -> Generated | Reason:  # fmt: skip
    """Lower and compare; and solve again with what was learned, while the error or the peak is over its
    limit. `built`, of which the best took `beside` seconds: by far faster ones leave this alone.

    Raises:
        InfeasibleError: nothing meets the goal. VerificationError: nothing that was tried does.
            LoweringError: it cannot be built.
    """
    if first.certificate.objective > worth_building(backend, built, SHORTLIST, beside):
        return not_built(first, built)

    def solved(constraints: Constraints) -> Plan:
        if constraints.round == 1:
            return first
        with bench.progress.step(f"price and solve for {backend.name}"):
            return search.plan_for(backend, constraints)

    packed: Packed = {}

    def run(plan: Plan, constraints: Constraints) -> tuple[Generated, Constraints | None]:
        with keeping(packed, plan.forms()):
            outcome, peak = _lowered(bench, backend, plan, told)
        passed = all(check.passed for check in outcome.plan.checks)
        over, last = excess(peak, bench.goal.memory), constraints.round == _ROUNDS
        if passed and not over:
            return outcome, None
        if not passed:
            if last or bench.goal.exact or not plan.predicted.error:
                raise not_within(backend.name, outcome.plan.checks)
            constraints = corrected(constraints, plan, worst(outcome.plan.checks), bench.goal)
        if over:
            constraints = held_to_less(constraints, over, bench.goal, last=last)
        return outcome, constraints

    return refine(solved, run, rounds=_ROUNDS, start=Constraints(budget=bench.goal.memory))


def _lowered(bench: Bench, backend: Backend, plan: Plan, told: Sequence[Told]) -> tuple[Generated, int]:
    """The plan carried out and compared, and its peak as measured."""
    with bench.progress.step(f"lower to {backend.name}"):
        step = replace(bench.step, layout=held_in(plan, bench.step.layout))
        program = step.program
        for each in bench.passes:
            program = each.apply(program, plan)
        for each in bench.before:
            step = step.before(partial(each.apply, plan=plan))
        lowered, parts = lower_step(step, program, backend, plan, bench.room, bench.texts)
    with bench.progress.step(f"compare {backend.name}"):
        stepper = Stepper(lowered, type(bench.model).forward, bench.model.config)
        found = checks(stepper, bench.model, told, bench.goal)
    peak = 0  # of a plan that is not kept, and not held to a budget, not asked
    if bench.goal.memory is not None or all(check.passed for check in found):
        with bench.progress.step(f"peak of {backend.name}"):
            source = longest_source(bench.texts)
            peak = measured.peak_bytes(stepper, parts, bench.model, bench.goal, source, bench.sight)
    plan = replace(
        plan,
        checks=tuple(found),
        settings=dict(parts["step"].settings),
        measured=replace(plan.predicted, seconds=None, peak_bytes=peak),
    )
    applied = forms_of(lowered.layout)
    for part in parts.values():
        applied |= part.applied
    decisions = tuple(
        replace(d, applied=applied[d.site].name if d.site in applied else d.applied) for d in plan.decisions
    )
    return Generated(plan=replace(plan, decisions=decisions), lowered=lowered, parts=parts), peak
