"""The whole path: capture, propose, solve, apply, lower, verify, measure, choose."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from effcompile.backends import load_backend
from effcompile.backends.base import Backend
from effcompile.capture import capture, variants, verify_capture, without_unproven_ones
from effcompile.compiler import measure
from effcompile.compiler.borne_out import confirmed, stale_timings
from effcompile.compiler.executable import Executable
from effcompile.compiler.inputs import GraphInputs, as_captured
from effcompile.compiler.machine import AUTO, Machine, resolve, usable_backends
from effcompile.compiler.progress import QUIET, Progress, entry
from effcompile.compiler.search import Search, explain_infeasible, fingerprint
from effcompile.compiler.settle import Outcome, Workshop, settle
from effcompile.compiler.verify import references, stress_references, stressed, worst
from effcompile.core.errors import (
    CaptureError,
    EffcompileError,
    FormatError,
    InfeasibleError,
    InternalError,
    LoweringError,
    UsageError,
    VerificationError,
)
from effcompile.core.goal import Goal
from effcompile.core.units import format_error
from effcompile.estimate import sensitivity
from effcompile.estimate.inputs import stress_inputs
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.plan import Candidate, Plan
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target
from effcompile.passes import OPTIONAL, Pass, load_passes
from effcompile.sites.attention.normalise import normalised
from effcompile.sites.parts import attentions

#: A backend predicted slower than the best by more than this factor is not built: predictions are not that wrong.
SHORTLIST = 1.08

#: Seconds for measuring how much each low-precision option changes the output.
SENSITIVITY_SECONDS = 15.0

#: `Program.left` of a program whose attentions stay as the model writes them.
_LEFT_AS_WRITTEN = {"": "fused, it rounds otherwise, and this model makes more of that than an exact plan allows"}

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@entry("plan")
def make_plan(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    goal: Goal,
    target: str | Target = AUTO,
    backend: str | None = None,
    passes: Sequence[str] | None = None,
    dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Inputs] | None = None,
    progress: Progress = QUIET,
) -> Plan:
    """The best plan, predicted and certified; nothing is lowered. Arguments as in `optimize`.

    Raises:
        CaptureError, InputsError: the model cannot be captured. InfeasibleError: no plan meets the goal.
    """
    _inference_only(goal)
    backends, absent = _backends_for(target, backend, lowered=False)
    machine = resolve(target, backends)
    given = list(calibration) if calibration is not None else None
    program = _with_calibration(_in_normal_form(model, args, kwargs, dynamic, progress), model, given)
    backends = backends if machine.here else _standing_in(backends, program, goal)
    search = _search(program, goal, machine, load_passes(passes), progress)
    plans, candidates = _plans(search, backends, absent, progress)
    best = plans[0][1]
    return replace(best, candidates=tuple(candidates), guards=GraphInputs(program).guards(), notes=(*best.notes, *machine.keep_timings()))


@entry("optimize")
def optimize(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    goal: Goal,
    target: str | Target = AUTO,
    backend: str | None = None,
    plan: Plan | None = None,
    passes: Sequence[str] | None = None,
    dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Inputs] | None = None,
    progress: Progress = QUIET,
) -> Executable:
    """Plan, lower, verify and measure; returns the fastest (or smallest) result that is within the goal.

    Args:
        model: any nn.Module; left as it is.
        args: positional example inputs; times hold for their shapes.
        kwargs: example inputs by keyword.
        goal: what to minimise under which limits.
        target: "auto" for this machine, a known name, a path to a target file, or a Target.
        backend: only this one; None chooses among all that run here.
        plan: an earlier plan of this model, applied without solving.
        passes: which passes, as `load_passes` takes them.
        dynamic: see `capture`.
        calibration: inputs like (args, kwargs) to measure errors with; None generates some.
        progress: is told what is being done.

    Raises:
        CaptureError, InputsError: the model cannot be captured. InfeasibleError: no plan meets the goal.
        VerificationError: no backend's result is within the goal. LoweringError: none could be built.
    """
    _inference_only(goal)
    given = list(calibration) if calibration is not None else None
    if plan is not None:
        return _reapply(model, args, kwargs, plan, passes, dynamic, given, progress)
    backends, absent = _backends_for(target, backend)
    machine = resolve(target, backends)
    program, checked = _captured(model, args, kwargs, dynamic, progress)

    def best_of(program: Program) -> Outcome:
        program = _with_calibration(program, model, given)
        search = _search(program, goal, machine, load_passes(passes), progress)
        plans, candidates = _plans(search, backends, absent, progress)
        shop = _workshop(program, model, search.passes, goal, progress)
        outcomes, told = _settle_all(shop, search, plans, candidates)
        best = _finish(model, program, outcomes, told, goal, progress)

        def solved_again() -> Outcome:
            again = replace(search, machine=machine.priced_anew(backends), _proposals={})
            solved, considered = _plans(again, backends, absent, progress)
            return _finish(model, program, *_settle_all(shop, again, solved, considered, outcomes), goal, progress)

        if machine.here:
            best = confirmed(best, lambda: _finish(model, program, outcomes, told, goal, progress), solved_again)
        return _stressed(shop, best)

    try:
        best = best_of(program)
    except (VerificationError, LoweringError, InternalError) as failure:
        if program.left == _LEFT_AS_WRITTEN or not attentions(program):
            raise
        try:
            best = best_of(_as_written(model, args, kwargs, dynamic))
        except EffcompileError:
            raise failure from None
        checked = (*checked, f"attention is left as written: {failure}")
    notes = (*best.plan.notes, *checked, *stale_timings(machine, best.plan.candidates), *machine.keep_timings())
    return Executable(model, best.program, best.lowered, replace(best.plan, notes=tuple(dict.fromkeys(notes))))


@entry("frontier")
def frontier(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, goal: Goal, points: int = 8, target: str | Target = AUTO,
    backend: str | None = None, passes: Sequence[str] | None = None, dynamic: bool | Mapping[str, Any] | None = None,
    calibration: Iterable[Inputs] | None = None, progress: Progress = QUIET,
) -> list[Plan]:  # fmt: skip
    """Predicted plans along the memory-time Pareto front of the best backend, least memory first. Arguments as in `optimize`."""
    _inference_only(goal)
    backends, absent = _backends_for(target, backend, lowered=False)
    machine = resolve(target, backends)
    given = list(calibration) if calibration is not None else None
    program = _with_calibration(_in_normal_form(model, args, kwargs, dynamic, progress), model, given)
    backends = backends if machine.here else _standing_in(backends, program, goal)
    search = _search(program, goal, machine, load_passes(passes), progress)
    plans, _ = _plans(search, backends, absent, progress)
    found = search.frontier(plans[0][0], points)
    machine.keep_timings()
    return found


def _inference_only(goal: Goal) -> None:
    if goal.mode != "inference":
        raise UsageError("mode = 'training' is not built yet: this release plans and lowers inference. Use mode = 'inference'.")


def _backends_for(target: str | Target, backend: str | None, *, lowered: bool = True) -> tuple[list[Backend], dict[str, str]]:
    """For this machine: what runs here. For another one: only what is named, else what would run there.

    `lowered`: the plan is carried out here, so that a backend that is named has to run here.
    """
    if backend is not None and target != AUTO and not lowered:
        return [load_backend(backend)], {}
    if target == AUTO or backend is not None:
        return usable_backends(backend)
    device = (target if isinstance(target, Target) else load_target(target)).device
    return [load_backend(name) for name in (("onnxruntime", "torch-inductor") if device == "cpu" else ("torch-inductor",))], {}


def _standing_in(backends: list[Backend], program: Program, goal: Goal) -> list[Backend]:
    """Of backends that stand in for those of a machine that is not here: the first that takes the program."""
    return [backend for backend in backends if backend.refuses(program, goal) is None][:1] or backends


def _in_normal_form(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any, progress: Progress) -> Program:
    """The captured program, its attentions one node each."""
    with progress.step("capture"):
        return normalised(capture(model, args, kwargs, dynamic=dynamic))


def _as_written(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any) -> Program:
    """The captured program, its attentions as the model writes them: where these in normal form do not verify."""
    return replace(capture(model, args, kwargs, dynamic=dynamic), left=_LEFT_AS_WRITTEN)


def _with_calibration(program: Program, model: nn.Module, given: Sequence[Inputs] | None) -> Program:
    """The program with the user's calibration inputs, positional and by keyword as at capture.

    Raises:
        InputsError: others than the example has.
    """
    signature = inspect.signature(model.forward)
    return replace(program, calibration=tuple(as_captured(program, signature, tuple(args), kwargs) for args, kwargs in given or ()))


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any, progress: Progress
) -> tuple[Program, tuple[str, ...]]:
    """The program, proven to compute what the model does, and a note saying so.

    Raises:
        CaptureError: the captured graph differs from the model (a mask or a size baked into it).
    """
    program = _in_normal_form(model, args, kwargs, dynamic, progress)
    with progress.step("verify the capture"):
        checks = verify_capture(program, model)
        if not all(check.passed for check in checks):  # top-k routing turns a difference in rounding into another expert
            program = _as_written(model, args, kwargs, dynamic)
            checks = verify_capture(program, model)
    for check in checks:
        if not check.passed:
            raise CaptureError(
                f"The captured graph of {program.name} differs from the model on {check.name}: relative error "
                f"{format_error(check.error)}{f' ({check.note})' if check.note else ''}. Capture it with static shapes (--static)."
            )
    program = without_unproven_ones(program, model)
    names = ", ".join(check.name + (f" ({check.note})" if check.note else "") for check in checks)
    return program, (f"captured graph equals the model on: {names}",)


def _search(program: Program, goal: Goal, machine: Machine, passes: tuple[Pass, ...], progress: Progress) -> Search:
    options = {} if goal.exact else _measured_options(passes)
    measured, text = _sensitivity(program, goal, passes, options, progress)
    notes = (*machine.notes, *program.mends, *(f"fixed: {line}" for line in program.fixed))
    return Search(
        program=program, goal=goal, machine=machine, passes=passes, sensitivity=measured, calibration_inputs=text, notes=notes,
        formats=_formats(options),
    )  # fmt: skip


def _formats(options: Mapping[str, tuple[Form, ...]]) -> tuple[WeightFormat, ...]:
    """What a dense linear may be held in, fp32 first."""
    return (FP32, *(form.weights for form in options.get("linear", ()) if form.weights is not None))


def _measured_options(passes: tuple[Pass, ...]) -> dict[str, tuple[Form, ...]]:
    """kind → options whose error has to be measured; several passes may add some to one kind of site."""
    options: dict[str, tuple[Form, ...]] = {}
    for each in passes:
        for kind, forms in each.measured_options().items():
            options[kind] = tuple(dict.fromkeys((*options.get(kind, ()), *forms)))
    return options


def _sensitivity(
    program: Program, goal: Goal, passes: tuple[Pass, ...], options: Mapping[str, tuple[Form, ...]], progress: Progress
) -> tuple[Sensitivity, str]:
    """Errors of every low-precision option, where the goal allows any; and which inputs they were measured on."""
    if goal.exact:
        return Sensitivity(errors={}, method="the goal allows no error"), ""
    given = program.calibration
    inputs = [*(given or [(program.args, program.kwargs), *sensitivity.generate_inputs(program, 3)]), *_stress(program, goal)]
    text = f"the user's: {len(given)} inputs" if given else f"the example and {sensitivity.describe_generated(3).partition(': ')[2]}"
    weights: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    for each in passes:
        weights |= each.replaced_weights(program)
    with progress.step("measure sensitivity"):
        tell = lambda _, share: progress.update("measure sensitivity", int(share * 100), 100)  # noqa: E731
        measured = sensitivity.measure(program, inputs, options, weights=weights, budget_seconds=SENSITIVITY_SECONDS, progress=tell)
    return measured, f"{text}; {measured.method}"


def _plans(
    search: Search, backends: Sequence[Backend], absent: Mapping[str, str], progress: Progress
) -> tuple[list[tuple[Backend, Plan]], list[Candidate]]:
    """A plan per backend, best predicted first, and a candidate line for each backend.

    Raises:
        InfeasibleError: no backend can meet the goal. InternalError, LoweringError: none can be priced; the first one's.
    """
    plans: list[tuple[Backend, Plan]] = []
    candidates = [Candidate(backend=name, note=reason) for name, reason in absent.items()]
    infeasible: dict[str, InfeasibleError] = {}
    failed: list[EffcompileError] = []
    for backend in backends:
        try:
            with progress.step(f"price and solve for {backend.name}"):
                if (reason := backend.refuses(search.program, search.goal)) is None:
                    plans.append((backend, search.plan_for(backend)))
                else:
                    candidates.append(Candidate(backend=backend.name, note=reason))
        except InfeasibleError as error:
            infeasible[backend.name] = error
            candidates.append(Candidate(backend=backend.name, note=f"infeasible: {error}"))
        except (InternalError, LoweringError) as error:  # the others are there
            failed.append(error)
            candidates.append(Candidate(backend=backend.name, note=f"failed: {error}"))
    if not plans:
        if infeasible:
            raise explain_infeasible(infeasible)
        if failed:
            raise failed[0]
        raise UsageError("No backend takes this model: " + "; ".join(f"{c.backend}: {c.note}" for c in candidates))
    plans.sort(key=lambda pair: pair[1].certificate.objective)
    candidates = [Candidate(backend=b.name, predicted_seconds=p.predicted.seconds) for b, p in plans] + candidates
    return plans, candidates


def _workshop(program: Program, model: nn.Module, passes: tuple[Pass, ...], goal: Goal, progress: Progress) -> Workshop:
    inputs = list(program.calibration) or ([] if goal.exact else _generated(program))
    seen = [*inputs[:8], *_stress(program, goal)]
    flat = [program.flat_inputs(args, kwargs) for args, kwargs in seen] or [program.flat_inputs()]
    with progress.step("reference outputs"):
        cases, stress = references(program, model, goal, inputs), stress_references(program, model, goal)
    return Workshop(model=model, program=program, passes=passes, goal=goal, cases=cases, calibration=flat, stress=stress, progress=progress)


def _stress(program: Program, goal: Goal) -> list[Inputs]:
    """What a robust goal also calibrates with."""
    return [(args, kwargs) for _, args, kwargs in stress_inputs(program)] if goal.robust else []


def _stressed(shop: Workshop, best: Outcome) -> Outcome:
    """The outcome with its error under stress inputs, for which the goal promises nothing."""
    run = Executable(shop.model, best.program, best.lowered, best.plan)
    return replace(best, plan=replace(best.plan, stress=stressed(run, best.program, shop.stress, shop.goal)))


def _generated(program: Program) -> list[Inputs]:
    """Inputs to calibrate static quantisers with: shaped like the example, and at the other sizes and paddings it will meet.

    Ranges taken from full sequences alone do not hold for padded ones: the error of NNCF's int8 BERT-base is 2.8e-2 on
    inputs like its calibration's and 5.3e-2 with a padded mask.
    """
    like_example = sensitivity.generate_inputs(program, 4, seed=1)
    other = [variants(replace(program, args=args, kwargs=kwargs)) for args, kwargs in like_example[:2]]
    return [*like_example, *((args, kwargs) for found in other for _, args, kwargs in found[1:])]


def _settle_all(
    shop: Workshop, search: Search, plans: Sequence[tuple[Backend, Plan]], candidates: list[Candidate], built: Sequence[Outcome] = ()
) -> tuple[list[Outcome], list[Candidate]]:
    """Lower and verify every backend on the shortlist; a backend that fails is told and passed over while another works.

    `built`: outcomes of an earlier solve, which are taken where the plan is still the same.

    Raises:
        EffcompileError: all failed; the first one's error.
    """
    outcomes: list[Outcome] = []
    failures: list[EffcompileError] = []
    for backend, plan in plans:
        best = min((o.plan.certificate.objective for o in outcomes), default=math.inf)
        worth_building = SHORTLIST * backend.slack * best
        if plan.certificate.objective > worth_building:
            why = f"not built: predicted {plan.certificate.objective / best:.2f}× the best"
            candidates = [replace(c, note=why) if c.backend == backend.name else c for c in candidates]
            continue
        if (same := next((o for o in built if o.plan.backend == backend.name and o.plan.options() == plan.options()), None)) is not None:
            outcomes.append(replace(same, plan=_priced_again(same.plan, plan)))
            continue
        try:
            outcomes.append(settle(shop, backend, plan, partial(search.plan_for, backend), worth_building=worth_building))
        except EffcompileError as error:
            failures.append(error)
            candidates = [replace(c, note=f"failed: {error}") if c.backend == backend.name else c for c in candidates]
    if not outcomes:
        raise failures[0]
    return outcomes, candidates


def _priced_again(built: Plan, plan: Plan) -> Plan:
    """A plan that was built, with the figures and the proof of another solve with the same choices."""
    applied = {d.site: d.applied for d in built.decisions}
    decisions = tuple(replace(d, applied=applied.get(d.site, d.applied)) for d in plan.decisions)
    return replace(
        built, decisions=decisions, declined=plan.declined, certificate=plan.certificate, predicted=plan.predicted, baseline=plan.baseline
    )


def _finish(
    model: nn.Module, program: Program, outcomes: Sequence[Outcome], candidates: Sequence[Candidate], goal: Goal, progress: Progress
) -> Outcome:
    """Time the original and all outcomes in turn, take the best, and complete its plan with what was measured."""
    with progress.step("measure"):
        seconds = measure.compare(program, model, outcomes)
        if goal.minimize == "time":
            best = min(outcomes, key=lambda o: seconds[o.plan.backend])
        else:
            best = min(outcomes, key=lambda o: (o.lowered.weight_bytes, seconds[o.plan.backend]))
        errors = {outcome.plan.backend: worst(outcome.checks) for outcome in outcomes}
        told = tuple(
            replace(c, measured_seconds=seconds.get(c.backend), error=errors.get(c.backend)) if c.backend in errors else c
            for c in candidates
        )
        plan = replace(
            best.plan,
            candidates=told,
            measured=measure.totals(best, seconds, errors[best.plan.backend]),
            measured_baseline=measure.baseline_totals(program, model, seconds),
        )
    return replace(best, plan=plan)


def _reapply(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: Plan, passes: Sequence[str] | None, dynamic: Any,
    given: list[Inputs] | None, progress: Progress,
) -> Executable:  # fmt: skip
    """Carry out a saved plan: nothing is solved, everything is verified and measured again.

    Raises:
        FormatError: the plan was made for another model.
    """
    backends, _ = usable_backends(plan.backend)
    program, checked = _captured(model, args, kwargs, dynamic, progress)
    if fingerprint(program) != plan.fingerprint:
        program = _as_written(model, args, kwargs, dynamic)
    if fingerprint(program) != plan.fingerprint:
        raise FormatError(
            f"This plan was made for another model: its graph has the fingerprint {plan.fingerprint}, {program.name} has "
            f"{fingerprint(program)}. Plan this model anew with `effcompile optimize` without --plan."
        )
    program = _with_calibration(program, model, given)
    named = OPTIONAL & {decision.by for decision in plan.decisions}  # the plan says how, they carry it out
    shop = _workshop(program, model, load_passes((*(passes or ()), *sorted(named))), plan.goal, progress)
    fresh = replace(plan, checks=(), stress=(), measured=None, measured_baseline=None, candidates=())
    outcome = settle(shop, backends[0], fresh, None)
    candidates = [Candidate(backend=plan.backend, predicted_seconds=plan.predicted.seconds, note="from a saved plan, not solved again")]
    best = _stressed(shop, _finish(model, program, [outcome], candidates, plan.goal, progress))
    notes = tuple(dict.fromkeys((*best.plan.notes, *checked)))
    return Executable(model, best.program, best.lowered, replace(best.plan, notes=notes))
