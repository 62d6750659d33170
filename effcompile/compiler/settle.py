"""From a plan to a verified result: apply, lower, count what changed, compare, and correct the error model
where it was wrong.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from effcompile.backends.base import Backend, Lowered
from effcompile.compiler.apply import apply_passes
from effcompile.compiler.counted import counted
from effcompile.compiler.leaner import hold_less
from effcompile.core.causes import OverWhenRun
from effcompile.core.errors import EffcompileError, InfeasibleError, LoweringError, VerificationError
from effcompile.core.findings import Corrected, Failed
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Reason
from effcompile.estimate.rehearse import Rehearsal
from effcompile.ir.figures import Candidate, Check
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.memory import give_back
from effcompile.machine.room import Room, device_of
from effcompile.passes import Pass
from effcompile.proof.alike import foreseen, holds_for_others
from effcompile.proof.rehearsed import emulated
from effcompile.proof.verify import Reference, explained, verify
from effcompile.runtime.executable import Executable
from effcompile.search.corrected import MARGIN, corrected
from effcompile.search.progress import QUIET, Progress
from effcompile.search.refine import Constraints, refine
from effcompile.search.shortlist import not_built

#: Solves at the most, the first one included.
MAX_ROUNDS = 5

#: An error predicted too high is corrected when its square was off by more than this factor ...
_WORTH_CORRECTING = 0.85
#: ... and the plan that this allows is lowered when its objective is better by more than this factor.
_WORTH_LOWERING = 0.97

#: Bytes of weights from which on half a second of collecting garbage is worth the bytes.
_LARGE = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A lowered plan whose checks passed. `plan` has what was found in the artifact, and the checks."""

    plan: Plan
    program: Program
    lowered: Lowered
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What every round of settling needs."""

    model: nn.Module
    program: Program
    passes: tuple[Pass, ...]
    goal: Goal
    cases: Sequence[Reference]
    calibration: Sequence[Sequence[torch.Tensor]]
    rehearsal: Rehearsal | None = None
    stress: Sequence[Reference] = ()
    progress: Progress = QUIET


class MilderError(VerificationError):
    """The error was predicted too low, and `plan`, which allows for it, is not built: another's is faster."""

    def __init__(self, plan: Plan, found: Reason) -> None:
        super().__init__(f"{found}; what allows for it is not built, for another backend's is better")
        self.plan = plan


class Settled(Protocol):
    """What a backend made of a plan."""

    @property
    def plan(self) -> Plan: ...


T = TypeVar("T", bound=Settled)


def as_saved(plan: Plan) -> Candidate:
    """The one candidate where a saved plan is carried out again."""
    return Candidate(
        backend=plan.backend,
        predicted_seconds=plan.predicted.seconds,
        note=Because("from a saved plan, not solved again"),
    )


def settle_all(
    plans: list[tuple[Backend, Plan]],
    candidates: Sequence[Candidate],
    settled: Callable[[Backend, Plan, Sequence[T]], T | Reason],
    before: Sequence[T] = (),
) -> tuple[list[T], list[Candidate]]:
    """Carry out every backend's plan; a backend that fails is told and passed over while another works.

    Args:
        plans: best predicted first; a milder one that is not built takes the place of the one that failed.
        candidates: the backends that were considered.
        settled: lowers a plan and verifies it, or says why it is not carried out, given what was built
            before.
        before: of other backends.

    Raises:
        EffcompileError: all failed; the first one's error.
    """
    outcomes: list[T] = [*before]
    failures: list[EffcompileError] = []
    notes: dict[str, Reason] = {}
    for at, (backend, plan) in enumerate(plans):
        try:
            made = settled(backend, plan, outcomes)
        except MilderError as error:
            plans[at], made = (backend, error.plan), not_built(error.plan, outcomes)
        except EffcompileError as error:
            failures.append(error)
            made = Failed(message=str(error))
        if isinstance(made, Reason):
            notes[backend.name] = made
        else:
            outcomes.append(made)
    if not outcomes:
        raise failures[0]
    tried = {backend.name: plan.predicted.seconds for backend, plan in plans}
    return outcomes, [
        replace(c, note=notes.get(c.backend), predicted_seconds=tried[c.backend]) if c.backend in tried else c
        for c in candidates
    ]


def settle(
    shop: Workshop,
    backend: Backend,
    plan: Plan,
    replan: Callable[[Constraints], Plan] | None,
    *,
    worth_building: float = math.inf,
) -> Outcome:
    """Lower a plan and verify it; while its error or its peak is over the limit, plan again with what was
    learned.

    The predicted squared error is scaled by measured / predicted, so that the next plan takes fewer or milder
    options; the memory that it may take is less by what the allocator held beside.

    Args:
        shop: the program and what to verify with.
        backend: lowers it.
        plan: the first plan.
        replan: makes another one under constraints; None for a plan that must be taken as it is.
        worth_building: a corrected plan whose objective is above this is not lowered: another backend's
            result is better.

    Raises:
        VerificationError: no round came within the limit. MilderError: only a plan that is not worth
            building would. InfeasibleError: none is within the memory when it is run.
        LoweringError: it could not be built.
    """
    proven = plan.certificate
    start = Constraints(
        error_scale=proven.error_scale, rounding_scale=proven.rounding_scale, budget=shop.goal.memory
    )
    expected: float | None = None
    if replan is not None and shop.rehearsal is not None and not shop.goal.exact:
        with shop.progress.step(f"rehearse for {backend.name}"):
            plan, start, expected = rehearsed(shop, shop.rehearsal, plan, start, replan)
        if plan.certificate.objective > worth_building:
            raise MilderError(plan, start.notes[-1])

    within: list[Plan] = []  # at all inputs that were run, others of their kind may be beyond

    def solve(constraints: Constraints) -> Plan:
        if constraints.round == 1 or replan is None:
            return plan
        made = replan(constraints)
        if made.certificate.objective > worth_building:
            raise MilderError(made, constraints.notes[-1])
        return made

    def run(made: Plan, constraints: Constraints) -> tuple[Outcome, Constraints | None]:
        outcome = _lower_and_check(shop, backend, made)
        measured, predicted = foreseen(outcome.checks), made.predicted.error or 0.0
        passed, over = all(check.passed for check in outcome.checks), _over(shop, outcome)
        last = replan is None or constraints.round == MAX_ROUNDS or predicted == 0.0
        if passed and not over and (last or holds_for_others(outcome.checks)):
            # what that allows was rehearsed, too
            foretold = expected is not None and measured**2 >= _WORTH_CORRECTING * expected**2
            if replan is not None and constraints.round == 1 and not foretold:
                outcome = _relaxed(shop, backend, outcome, replan, constraints)
            return outcome, None
        if passed and not over:
            within[:] = [made]
        elif not passed and (last or not measured < float("inf")):
            raise not_within(outcome.plan.backend, explained(outcome.checks, shop.cases))
        if not passed or not over:
            constraints = corrected(constraints, made, measured, shop.goal)
        least = replan is None or constraints.round == MAX_ROUNDS
        return outcome, held_to_less(constraints, over, shop.goal, last=least) if over else constraints

    try:
        return refine(solve, run, rounds=MAX_ROUNDS, start=start)
    except MilderError:
        raise
    except (InfeasibleError, VerificationError, LoweringError):
        if not within:
            raise
        # no plan leaves room for others of the kind
        return _lower_and_check(shop, backend, within[0])


def held_to_less(constraints: Constraints, over: int, goal: Goal, *, last: bool) -> Constraints:
    """The constraints after a round in which the allocator held so many bytes more than the goal allows.

    Raises:
        InfeasibleError: it was the last one, or nothing would be left.
    """
    if last or over >= (constraints.budget or 0):
        raise InfeasibleError(OverWhenRun(budget=goal.memory or 0, over=over), binding=("memory",))
    note = Because(
        "round {}: the allocator held {bytes} more than allowed; solved again with so much less",
        (constraints.round, over),
    )
    return constraints.with_less(over, note)


def _over(shop: Workshop, outcome: Outcome) -> int:
    """Bytes that the allocator holds beyond the limit at the example inputs."""
    if shop.goal.memory is None:
        return 0
    return excess(outcome.lowered.peak_bytes(outcome.program.flat_inputs()), shop.goal.memory)


def rehearsed(
    shop: Workshop,
    rehearsal: Rehearsal,
    plan: Plan,
    start: Constraints,
    replan: Callable[[Constraints], Plan],
) -> tuple[Plan, Constraints, float | None]:
    """The plan to lower first, and the constraints that it holds to: the error model corrected by what
    emulation shows, in both ways.

    With them the error that was emulated of that plan, None where none was. An emulated call takes about as
    long as two of the model, lowering as long as a hundred.
    """
    held: tuple[Plan, Constraints, float] | None = None
    constraints = start
    errors: dict[frozenset[tuple[str, str]], float | None] = {}
    for turn in range(1, MAX_ROUNDS + 1):
        chosen, predicted = frozenset(plan.options().items()), plan.predicted.error or 0.0
        if chosen not in errors:  # correcting in both ways may come back to a plan
            errors[chosen] = (
                emulated(shop.program, rehearsal, plan, shop.cases, shop.goal) if predicted else None
            )
        if (error := errors[chosen]) is None:
            break
        if fits := error <= shop.goal.tolerance:
            scale = (error / predicted) ** 2 * MARGIN
            if held is not None and held[0].certificate.objective <= plan.certificate.objective:
                return held
            if held is not None or scale >= _WORTH_CORRECTING:
                return plan, constraints, error
            held = plan, constraints, error
            note = Corrected(
                round=turn, measured=error, predicted=predicted, factor=scale**0.5, emulated=True
            )
            learned = constraints.with_errors_scaled(scale, note)
        else:
            rounds = partial(emulated, shop.program, rehearsal, _rounding(plan), shop.cases, shop.goal)
            constraints = replace(constraints, round=turn)
            learned = corrected(constraints, plan, error, shop.goal, emulated=True, rounding=rounds)
        try:
            better = replan(replace(learned, round=turn + 1))
        except InfeasibleError:  # the artifact has the last word
            break
        if fits and better.certificate.objective > _WORTH_LOWERING * plan.certificate.objective:
            break
        plan, constraints = better, replace(learned, round=1)
    return held or (plan, constraints, errors.get(frozenset(plan.options().items())))


def _rounding(plan: Plan) -> Plan:
    """What a plan rounds to 16 bits, alone."""
    return replace(plan, decisions=tuple(d for d in plan.decisions if d.form is not None and d.form.rounds))


def _relaxed(
    shop: Workshop,
    backend: Backend,
    outcome: Outcome,
    replan: Callable[[Constraints], Plan],
    constraints: Constraints,
) -> Outcome:
    """The outcome, or a better one that an over-estimated error had ruled out; tried once, kept only if it
    verifies.
    """
    measured, predicted = foreseen(outcome.checks), outcome.plan.predicted.error or 0.0
    scale = (measured / predicted) ** 2 * MARGIN if predicted > 0 else 1.0
    if scale >= _WORTH_CORRECTING:
        return outcome
    note = Corrected(round=1, measured=measured, predicted=predicted, factor=scale**0.5)
    plan = replan(Constraints(round=2, budget=constraints.budget).with_errors_scaled(scale, note))
    if plan.certificate.objective > _WORTH_LOWERING * outcome.plan.certificate.objective:
        return outcome
    outcome.lowered.rest()
    try:
        second = _lower_and_check(shop, backend, plan)
    except LoweringError:
        return outcome
    passed = all(check.passed for check in second.checks)
    holds = passed and holds_for_others(second.checks) and not _over(shop, second)
    return second if holds else outcome


def _lower_and_check(shop: Workshop, backend: Backend, plan: Plan) -> Outcome:
    needed = int(backend.copies * shop.program.weight_bytes())
    if refusal := Room.of(device_of(shop.model), needed, None).refusal(needed, needed):
        raise LoweringError(
            f"Lowering to {backend.name} {refusal}: weights are held about {backend.copies} times beside the "
            "model. Close what else holds memory, or let another backend do it (--backend torch-eager "
            "copies least)."
        )
    let_go(shop.program)  # what capture and prices left, before weights are held once more
    with shop.progress.step(f"lower to {backend.name}"):
        tagged = apply_passes(shop.program, shop.passes, plan, next(iter(shop.cases), None))
        lowered = backend.lower(tagged, plan, shop.calibration)
    let_go(shop.program)
    run = Executable(shop.model, tagged, lowered, plan)
    with shop.progress.step(f"verify {backend.name}"):
        checks = verify(run, tagged, shop.cases, shop.goal)
    if all(check.passed for check in checks):
        with shop.progress.step(f"tune {backend.name}"):
            changed = lowered.tune(tagged.flat_inputs())
            changed = hold_less(shop.goal, tagged, lowered) or changed
        checks = verify(run, tagged, shop.cases, shop.goal) if changed else checks  # of what the user holds
    plan = counted(plan, shop.program, lowered)
    plan = replace(plan, checks=tuple(checks), settings=dict(lowered.settings))
    return Outcome(plan=plan, program=tagged, lowered=lowered, checks=tuple(checks))


def let_go(program: Program) -> None:
    """Give back what nobody refers to any more: graphs are circles, which Python's collector comes to late,
    and large ones are many.
    """
    if program.weight_bytes() > _LARGE:
        gc.collect()
        give_back()


def not_within(backend: str, checks: Sequence[Check]) -> VerificationError:
    """The refusal of a result one of whose checks did not pass: the one that is farthest off."""
    bad = max(checks, key=lambda check: check.error)
    note = f" ({bad.note})" if bad.note else ""
    return VerificationError(
        f"The {backend} result is not within the declared error: {bad.name}: relative error {bad.error:.3e} "
        f"> {bad.limit:.3e}{note}. Allow more error, choose another backend, or leave a pass out with --pass "
        "no-NAME."
    )
