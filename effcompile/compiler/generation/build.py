"""The whole path of a generation: capture a step, price both regimes, solve, lower, compare by teacher forcing, measure, choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch

from effcompile.backends import usable_backends
from effcompile.backends.base import Backend, Lowered
from effcompile.capture.generation import GenerationStep, capture_step, encoder_output
from effcompile.compiler.generation.lower import lower_step
from effcompile.compiler.settle import corrected, settle_all
from effcompile.core import gpu
from effcompile.core.errors import InfeasibleError, UsageError, VerificationError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.core.types import Args, HFModel, Kwargs
from effcompile.estimate import kept
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.passes import Choice, Pass, load_passes
from effcompile.proof.generation import measured
from effcompile.proof.generation.check import Told, checks, told_by
from effcompile.runtime.generation.executable import GenerationExecutable, Stepper
from effcompile.runtime.generation.steps import CacheRoom, LoweredStep
from effcompile.search.generation.cases import scored
from effcompile.search.generation.held import CACHE, cache_choice, dtype_in, form_of
from effcompile.search.generation.regimes import regimes_of
from effcompile.search.generation.room import fitting, largest_context
from effcompile.search.generation.text import as_inputs, calibration_text
from effcompile.search.machine import Machine, resolve
from effcompile.search.pricing import formats, measured_options, plans_for, replaced_weights
from effcompile.search.progress import Progress, entry
from effcompile.search.refine import Constraints, refine
from effcompile.search.request import Asked, Task
from effcompile.search.search import Regimes, Search, stored_notes

#: Where a step of generation runs.
BACKENDS = ("torch-eager", "onnxruntime")
#: What decides about it unless passes are named.
PASSES = ("rows", "quantize")
#: Tokens of a prompt that are prefilled at once: longer ones in chunks of so many.
CHUNK = 512
#: Solves until the measured error and peak are within the limits.
_ROUNDS = 4
_SENSITIVITY_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Shop:
    """What every backend and every round needs."""

    model: HFModel
    step: GenerationStep
    goal: Goal
    passes: tuple[Pass, ...]
    machine: Machine
    room: CacheRoom
    texts: tuple[torch.Tensor, ...]
    said: str
    sensitivity: Sensitivity
    beside: tuple[Choice, ...]
    regimes: Regimes
    progress: Progress

    def search(self) -> Search:
        """What may be decided, priced."""
        options = {} if self.goal.exact else measured_options(self.passes)
        program = self.step.program
        return Search(
            program=program, regimes=self.regimes, goal=self.goal, machine=self.machine, passes=self.passes,
            sensitivity=self.sensitivity, calibration_inputs=self.said,
            notes=(*self.machine.notes, *stored_notes(program), *program.mends),
            formats=formats(options), explained=lambda error: largest_context(error, self.step, self.goal),
            beside=self.beside,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A lowered plan within its limits."""

    plan: Plan
    lowered: LoweredStep
    parts: dict[str, Lowered]


@entry("optimize")
def optimize_generation(model: HFModel, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> GenerationExecutable:
    """Plan, lower, compare and measure a Hugging Face model for generation. Arguments as in Request; inputs serve as calibration text.

    Raises:
        UsageError: no Hugging Face model, a context that it has no positions for, or no backend that takes it.
        CaptureError: it cannot be captured.
        InfeasibleError: no plan meets the goal. VerificationError: no backend's result is within it.
    """
    task = Task.of(model, args, kwargs, asked)
    if task.request.plan is not None:
        raise UsageError("A saved plan of a generation is opened with effcompile.load(folder); plan again without plan=.")
    backends = _backends(task.request.backend)
    shop = _shop(task, backends)
    with shop.progress.step("reference outputs"):
        told = told_by(model, shop.texts, _source_of(shop.step, model, shop.texts), shop.goal)
    search = shop.search()
    plans, candidates = plans_for(search, backends, {}, shop.progress)
    outcomes, considered = settle_all(plans, candidates, partial(_settle, shop, search, told))
    with shop.progress.step("measure"):
        found = measured.compared(model, {o.plan.backend: o.lowered for o in outcomes}, shop.goal)
    totals = {o.plan.backend: found.each[o.plan.backend].total(shop.goal) for o in outcomes}
    small = lambda outcome: outcome.plan.measured.peak_bytes or 0  # noqa: E731
    best = min(outcomes, key=small if shop.goal.minimize == "memory" else lambda o: totals[o.plan.backend])
    plan = measured.told(best.plan, found, best.plan.backend, shop.goal, best.lowered, best.parts, shop.step.program)
    considered = [replace(c, measured_seconds=totals.get(c.backend)) for c in considered]
    notes = (*plan.notes, *shop.machine.keep_timings())
    return GenerationExecutable(model, shop.step, best.lowered, replace(plan, candidates=tuple(considered), notes=notes), best.parts)


@entry("plan")
def plan_generation(model: HFModel, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The best predicted plan; nothing is lowered. Raises what `optimize_generation` does."""
    task = Task.of(model, args, kwargs, asked)
    backends = _backends(task.request.backend)
    shop = _shop(task, backends)
    return plans_for(shop.search(), backends, {}, shop.progress)[0][0][1]


def _backends(name: str | None) -> list[Backend]:
    """Those that run a step here.

    Raises:
        UsageError: the named one does not.
    """
    if name is not None and name not in BACKENDS:
        raise UsageError(f"backend = {name!r} does not run generation; {' and '.join(BACKENDS)} do. Choose one of them, or leave it out.")
    if name is not None:
        return usable_backends(name)[0]
    return [backend for backend in usable_backends(None)[0] if backend.name in BACKENDS]


def _shop(task: Task, backends: list[Backend]) -> Shop:
    """Captured and priced."""
    asked = task.request
    model: HFModel = task.model
    goal, progress = asked.goal, asked.progress
    context, _, _ = goal.tokens
    fitting(model, context)
    with progress.step("capture"):
        step = capture_step(model)
    machine = resolve(asked.target, backends, gpu.place_of(model))
    passes = load_passes(asked.passes or PASSES)
    given = list(asked.calibration or ()) or ([(task.args, task.kwargs)] if task.args or task.kwargs else None)
    if model.config.is_encoder_decoder:
        given = None
    with progress.step("calibration text"):
        texts, said = calibration_text(model, given, context)
    with progress.step("measure sensitivity"):
        found = _sensitivity(step, goal, passes, texts)
        beside = cache_choice(step, model, goal, machine.target, texts, _source_of(step, model, texts))
    regimes = regimes_of(step, goal, CHUNK)
    room = CacheRoom(context=context, chunk=CHUNK)
    return Shop(
        model=model, step=step, goal=goal, passes=passes, machine=machine, room=room, texts=tuple(texts), said=said, sensitivity=found,
        beside=beside, regimes=regimes, progress=progress,
    )  # fmt: skip


def _sensitivity(step: GenerationStep, goal: Goal, passes: tuple[Pass, ...], texts: Sequence[torch.Tensor]) -> Sensitivity:
    """Error of every low-precision option at the logits of the calibration text."""
    if goal.exact:
        return Sensitivity(errors={}, method="the goal allows no error")
    program = scored(step.program)
    inputs = [as_inputs(text, step.layout, program.kwargs) for text in texts]
    weights = replaced_weights(passes, program)
    return kept.measured(program, inputs, measured_options(passes), weights=weights, budget_seconds=_SENSITIVITY_SECONDS)


def _source_of(step: GenerationStep, model: HFModel, texts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The encoder's output that a decoder is compared behind."""
    if step.encoder is None:
        return {}
    rows = texts[0].shape[0]
    inputs = {name: value[:1].expand(rows, *value.shape[1:]) for name, value in step.encoder.kwargs.items()}
    with torch.no_grad():
        hidden = model.get_encoder()(**inputs, return_dict=True).last_hidden_state
    return {"encoder_outputs": encoder_output(hidden)}


def _settle(shop: Shop, search: Search, told: Sequence[Told], backend: Backend, first: Plan, _: Sequence[Generated]) -> Generated:
    """Lower and compare; and solve again with what was learned, while the error or the peak is over its limit.

    Raises:
        InfeasibleError: nothing meets the goal. VerificationError: nothing that was tried does. LoweringError: it cannot be built.
    """

    def solved(constraints: Constraints) -> Plan:
        if constraints.round == 1:
            return first
        with shop.progress.step(f"price and solve for {backend.name}"):
            return search.plan_for(backend, constraints)

    def run(plan: Plan, constraints: Constraints) -> tuple[Generated, Constraints | None]:
        outcome, peak = _lowered(shop, backend, plan, told)
        worst = max(outcome.plan.checks, key=lambda check: check.error)
        over, last = excess(peak, shop.goal.memory), constraints.round == _ROUNDS
        if worst.passed and not over:
            return outcome, None
        if not worst.passed:
            if last or shop.goal.exact or not plan.predicted.error:
                raise VerificationError(
                    f"The {backend.name} result is not within the declared error: {worst.name}: relative error {worst.error:.3e} > "
                    f"{worst.limit:.3e}. Allow more error, or choose another backend."
                )
            constraints = corrected(constraints, worst.error, plan.predicted.error, shop.goal)
        if over:
            if last or over >= (constraints.budget or 0):  # nothing would be left
                raise largest_context(InfeasibleError(binding=("memory",)), shop.step, shop.goal)
            note = Because(
                "round {}: the allocator held {bytes} more than allowed; solved again with so much less", (constraints.round, over)
            )
            constraints = constraints.with_less(over, note)
        return outcome, constraints

    return refine(solved, run, rounds=_ROUNDS, start=Constraints(budget=shop.goal.memory))


def _lowered(shop: Shop, backend: Backend, plan: Plan, told: Sequence[Told]) -> tuple[Generated, int]:
    """The plan carried out and compared, and its peak as measured."""
    with shop.progress.step(f"lower to {backend.name}"):
        step = replace(shop.step, layout=shop.step.layout.narrowed(dtype_in(plan)))
        program = step.program
        for each in shop.passes:
            program = each.apply(program, plan)
        lowered, parts = lower_step(step, program, backend, plan, shop.room, shop.texts)
    with shop.progress.step(f"compare {backend.name}"):
        stepper = Stepper(lowered, type(shop.model).forward, shop.model.config)
        found = checks(stepper, shop.model, told, shop.goal)
    with shop.progress.step(f"peak of {backend.name}"):
        peak = measured.peak_bytes(stepper, parts, shop.model, shop.goal, shop.room)
    plan = replace(
        plan, checks=tuple(found), settings=dict(parts["step"].settings), measured=replace(plan.predicted, seconds=None, peak_bytes=peak)
    )
    applied = {**parts["step"].applied, CACHE: form_of(lowered.layout)}
    decisions = tuple(replace(d, applied=applied[d.site].name if d.site in applied else d.applied) for d in plan.decisions)
    return Generated(plan=replace(plan, decisions=decisions), lowered=lowered, parts=parts), peak
