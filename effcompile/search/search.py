"""Passes propose, z3 decides: one solve per backend, every choice of every pass in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from torch import fx

from effcompile import planner
from effcompile.backends.base import Backend
from effcompile.backends.torch.numerics import not_here
from effcompile.core.causes import Cause, Limits, MachineTooSmall, TookMore
from effcompile.core.cost import Cost, total
from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.core.installed import versions
from effcompile.core.reasons import Because, Reason, Unsupported
from effcompile.estimate.nodes import estimate
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.formats import FP32, WeightFormat
from effcompile.ir.of_sizes import SHARE, OfSizes, may_be_kept, of_sizes
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, Target
from effcompile.passes import Choice, Context, Declined, Pass, propose_all
from effcompile.search.machine import BASELINE, Machine
from effcompile.search.proposal import Proposal
from effcompile.search.refine import Constraints
from effcompile.search.regimes import CALL, FREE, KEEPING, NARROW, Regime, Regimes, merged
from effcompile.search.told import decision, not_taken
from effcompile.sites.parts import stored_format

#: The solver proves that nothing is cheaper by more than this share.
GAP = 0.01


def _lacks(backend: Backend, target: Target, call: KernelCall) -> Reason | None:
    """Why a backend has no such kernel; of torch's engines also where this processor has none, which lowers
    plans for processors.
    """
    if (reason := backend.lacks(call)) is not None or target.device != "cpu":
        return reason
    linear = call.format if call.kernel.startswith("linear/") and backend.name.startswith("torch-") else None
    return None if linear is None else not_here(linear)


@dataclass(frozen=True, kw_only=True)
class Search:
    """One model, one goal, one machine; `plan_for` answers for each backend, again under what running it
    taught.

    explained: adds to an error what is known beyond it. beside: choices of no pass, on the backend whose
    graphs write in place; own: on a backend alone, by its name.
    """

    program: Program
    regimes: Regimes
    goal: Goal
    machine: Machine
    passes: tuple[Pass, ...]
    formats: tuple[WeightFormat, ...]  # what a dense linear may be held in
    sensitivity: Sensitivity
    calibration_inputs: str
    notes: tuple[Reason, ...] = ()
    explained: Callable[[InfeasibleError], InfeasibleError] = lambda error: error
    beside: tuple[Choice, ...] = ()
    own: Mapping[str, tuple[Choice | Declined, ...]] = field(default_factory=dict)
    _proposals: dict[str, Proposal] = field(default_factory=dict)

    def plan_for(self, backend: Backend, constraints: Constraints = FREE) -> Plan:
        """The best plan on one backend, predicted and certified.

        Raises:
            InfeasibleError: nothing meets the goal and the constraints on this backend.
        """
        proposal = self._proposal(backend)
        scaled = replace(proposal, choices=tuple(_scaled(choice, constraints) for choice in proposal.choices))
        asked = self.goal if constraints.budget is None else replace(self.goal, memory=constraints.budget)
        beyond = (self.goal.memory or 0) - (asked.memory or 0)  # what running took and nobody had foreseen
        plans: list[Plan] = []
        infeasible: list[InfeasibleError] = []
        for part in _without_conflicts(scaled, backend.conflicts):
            goal = self._on_the_machine(part, asked)
            problem = part.problem(goal)
            try:
                solution = planner.solve(problem, gap=GAP)
            except InfeasibleError as error:
                error = _with_errors(error)
                error = _counting(error, beyond) if beyond else error
                infeasible.append(error if goal is asked else too_large(error, self.machine.target))
                continue
            plans.append(self._plan(part, problem, solution, constraints))
        if not plans:
            raise self.explained(infeasible[0])
        return _best(plans)

    def frontier(self, backend: Backend, points: int) -> list[Plan]:
        """Plans along the memory-time Pareto front on one backend, least memory first."""
        proposal = self._proposal(backend)
        goal = self._on_the_machine(proposal, self.goal)
        problem = proposal.problem(goal)
        try:
            solutions = planner.frontier(problem, "memory", points)
        except InfeasibleError as error:
            error = _with_errors(error)
            raise error if goal is self.goal else too_large(error, self.machine.target) from error
        return [self._plan(proposal, problem, solution, FREE) for solution in solutions]

    def _on_the_machine(self, proposal: Proposal, goal: Goal) -> Goal:
        """The goal with the machine's memory as its limit, where that is less than what was allowed and what
        may be needed.
        """
        size, allowed = self.machine.target.memory_bytes, goal.memory
        fits = size <= 0 or (allowed is not None and allowed <= size) or proposal.at_most_bytes() <= size
        return goal if fits else replace(goal, memory=size)

    @cached_property
    def baseline(self) -> Totals:
        """Predicted figures of the unplanned model in stock torch."""
        target, regimes = self.machine.target, self.regimes
        seconds = regimes.own_seconds + sum(
            regime.calls * estimate(regime.program, target, BASELINE).seconds for regime in regimes.each
        )
        peak = regimes.weight_bytes + regimes.kept_bytes
        return Totals(seconds=seconds, weight_bytes=regimes.stored_bytes, peak_bytes=peak, error=0.0)

    def context(self, backend: Backend) -> Context:
        """What passes propose for on one backend."""
        return Context(
            goal=self.goal, target=self.machine.target, backend=backend.name, formats=self.formats,
            sensitivity=self.sensitivity.errors, stored=stored_format(self.program),
            lacks=cache(partial(_lacks, backend, self.machine.target)),
        )  # fmt: skip

    def _proposal(self, backend: Backend) -> Proposal:
        name = backend.name
        if name not in self._proposals:
            found = self._proposed(backend)
            made = [choices for choices, _ in found]
            beside = self.beside if name in NARROW.get(self.machine.target.device, ()) else ()
            choices = (*merged(self.regimes.each, made), *beside, *self._own(name))
            first, *others = (declined for _, declined in found)
            others.append([each for each in self.own.get(name, ()) if isinstance(each, Declined)])
            said = {(d.site, d.option) for d in first}
            self._proposals[name] = Proposal(
                backend=name, choices=choices,
                declined=(*first, *(d for more in others for d in more if (d.site, d.option) not in said)),
                rest=self._rest(name, made, choices),
                provenance=total([o.cost for c in choices for o in c.options]).provenance,
            )  # fmt: skip
        return self._proposals[name]

    def _proposed(self, backend: Backend) -> list[tuple[list[Choice], list[Declined]]]:
        """What the passes propose in each regime, with one time of each kernel: again where one was corrected
        meanwhile, with which some were priced as it was (merged linears would save more than all take).
        """
        context = self.context(backend)
        while True:
            before = self.machine.amended
            found = [
                propose_all(
                    self.passes if regime.passes is None else regime.passes,
                    regime.program,
                    replace(context, elsewhere=self.regimes.elsewhere(regime)),
                )
                for regime in self.regimes.each
            ]
            if self.machine.amended == before:
                return found

    def _own(self, backend: str) -> list[Choice]:
        """What this backend alone has to choose."""
        return [each for each in self.own.get(backend, ()) if isinstance(each, Choice)]

    def _rest(self, backend: str, made: Sequence[Sequence[Choice]], choices: Sequence[Choice]) -> Cost:
        """Seconds of nodes that no choice covers, bytes of weights that no choice stores, and what is held
        beside them.
        """
        decided, target = {choice.site for choice in choices}, self.machine.target
        seconds = roof = self.regimes.own_seconds  # what is not planned is at no roof but its own
        for regime, of_regime in zip(self.regimes.each, made, strict=True):
            covered = frozenset[fx.Node]().union(
                *(choice.covers for choice in of_regime if choice.site in decided),
                self._kept(backend, regime),
            )
            predicted = estimate(regime.program, target, backend, overrides=dict.fromkeys(covered, 0.0))
            seconds += regime.calls * (predicted.seconds + regime.beside)
            alone = (call for node, calls in predicted.calls.items() if node not in covered for call in calls)
            roof += regime.calls * sum(map(target.roof, alone))
        base = lambda some: total([choice.option(choice.baseline).cost for choice in some])  # noqa: E731
        own = base(choices)
        seconds = max(seconds - base(self._own(backend)).seconds, 0.0)  # these nodes are counted above
        weights = max(self.regimes.weight_bytes - own.weight_bytes, 0)
        kept = max(self.regimes.kept(backend) - own.bytes_kept, 0)
        return Cost(seconds=seconds, roof_seconds=roof, weight_bytes=weights, bytes_kept=kept)

    def _kept(self, backend: str, regime: Regime) -> set[fx.Node]:
        """What a call finds as the last one of its sizes left it."""
        keeps = backend in KEEPING and self.machine.target.device == "cpu" and may_be_kept(self.goal)
        found = of_sizes(regime.program.graph) if keeps and regime.name == CALL else OfSizes()
        return found.operators() if found.nbytes() <= SHARE * self.regimes.weight_bytes else set()

    def _plan(
        self,
        proposal: Proposal,
        problem: planner.Problem,
        solution: planner.Solution,
        constraints: Constraints,
    ) -> Plan:
        chosen = {choice.site: choice.option(solution.choice[choice.site]) for choice in proposal.choices}
        cost = total([proposal.rest, *(option.cost for option in chosen.values())])
        return Plan(
            model=self.program.name,
            fingerprint=fingerprint(self.program),
            parameters=self.program.parameter_count(),
            goal=self.goal,
            target=self.machine.target.name,
            target_line=self.machine.target.describe(),
            backend=proposal.backend,
            decisions=tuple(decision(choice, chosen[choice.site]) for choice in proposal.choices),
            declined=(*proposal.declined, *not_taken(proposal.choices, chosen, problem, solution, self.goal)),
            certificate=_certificate(solution, constraints),
            baseline=self.baseline,
            predicted=Totals(
                seconds=cost.seconds,
                roof_seconds=cost.roof_seconds or None,
                weight_bytes=cost.weight_bytes,
                peak_bytes=cost.peak_bytes,
                error=cost.error,
            ),
            inputs=describe_inputs(self.program),
            calibration_inputs=self.calibration_inputs,
            notes=(*self.notes, *constraints.notes),
            versions=versions(),
        )


def fingerprint(program: Program) -> str:
    """A short hash of the graph's operators, constants' shapes and inputs: a plan fits only the model it was
    made for.
    """
    digest = hashlib.sha256()
    for spec in program.inputs:
        digest.update(f"{spec.name}{spec.dtype}{len(spec.shape)};".encode())
    for node in program.graph.nodes:
        tensor = program.tensor(node)
        digest.update(
            f"{node.op}:{node.target}:{tuple(tensor.shape) if tensor is not None else ''};".encode()
        )
    return digest.hexdigest()[:16]


def describe_inputs(program: Program) -> tuple[str, ...]:
    """One line for each input with its example sizes: `input_ids [batch=1 × seq=128] int64`."""
    lines = []
    for spec, tensor in zip(program.inputs, program.flat_inputs(), strict=True):
        dims = [
            str(size) if isinstance(dim, int) else f"{dim}={size}"
            for dim, size in zip(spec.shape, tensor.shape, strict=True)
        ]
        lines.append(f"{spec.name} [{' × '.join(dims)}] {spec.dtype}")
    return tuple(lines)


def too_large(error: InfeasibleError, target: Target) -> InfeasibleError:
    """The error where the limit on memory is the machine's own: asking for more of it is no remedy."""
    nearest = {limit: value for limit, value in error.nearest.items() if limit != "memory"}
    machine = MachineTooSmall(
        target=target.name, memory_bytes=target.memory_bytes, needed=error.needed or None
    )
    return InfeasibleError(machine, *error.why, binding=error.binding, nearest=nearest)


def stored_notes(program: Program) -> tuple[Reason, ...]:
    """What "fp32" stands for in a plan of a model in 16 bits."""
    if stored_format(program) == FP32:
        return ()
    return (Because("the model's weights have 16 bits: where the plan says fp32, they stay as they are"),)


def explain_infeasible(errors: Mapping[str, InfeasibleError]) -> InfeasibleError:
    """One error for a goal that no backend meets: the nearest misses."""
    return min(errors.values(), key=lambda e: sum(e.nearest.values(), start=0.0))


def _counting(error: InfeasibleError, beyond: int) -> InfeasibleError:
    """With the memory that was asked for, of which so many bytes were taken that nobody had foreseen."""
    whole = lambda name, value: value + beyond * (name == "memory")  # noqa: E731
    why = list[Cause]()
    for cause in error.why:
        if isinstance(cause, Limits) and "memory" in dict(cause.limits):
            limits = tuple((name, whole(name, value)) for name, value in cause.limits)
            why += (replace(cause, limits=limits), TookMore(over=beyond))
        else:
            why.append(cause)
    nearest = {name: whole(name, value) for name, value in error.nearest.items()}
    return InfeasibleError(*why, binding=error.binding, nearest=nearest, untried=error.untried)


def _with_errors(error: InfeasibleError) -> InfeasibleError:
    """With errors as errors, and not as the squares that add up."""
    limit, root = {"error_squared": "max_error"}, {"error_squared": math.sqrt}
    nearest = {limit.get(name, name): root.get(name, float)(value) for name, value in error.nearest.items()}
    why = tuple(
        replace(
            cause,
            limits=tuple(
                (limit.get(name, name), root.get(name, float)(value)) for name, value in cause.limits
            ),
        )
        if isinstance(cause, Limits)
        else cause
        for cause in error.why
    )
    binding = tuple(limit.get(name, name) for name in error.binding)
    return InfeasibleError(*why, binding=binding, nearest=nearest, untried=error.untried)


def _scaled(choice: Choice, constraints: Constraints) -> Choice:
    if constraints.error_scale == constraints.rounding_scale == 1.0:
        return choice
    scaled = (replace(o, cost=o.cost.with_error_scaled(constraints.scale_of(o.form))) for o in choice.options)
    return replace(choice, options=tuple(scaled))


def _best(plans: Sequence[Plan]) -> Plan:
    """The best of the parts, its bound that of all of them.

    Of those that are alike but for the solver's gap it is the last, without what stands second in a pair: a
    switch of a whole model does more than its price says (MiniLM by OpenVINO: bf16 for the sake of one linear
    took 4 % more).
    """
    least = min(plan.certificate.objective for plan in plans)
    # differences of prices may sum below zero where other work disturbed them
    best = [p for p in plans if p.certificate.objective - GAP * abs(p.certificate.objective) <= least][-1]
    proven, bound = best.certificate, min(plan.certificate.bound for plan in plans)
    if bound >= proven.bound:
        return best
    gap = (proven.objective - bound) / abs(proven.objective)
    return replace(best, certificate=replace(proven, bound=bound, gap=max(gap, proven.gap)))


def _without_conflicts(proposal: Proposal, conflicts: Sequence[tuple[str, str]]) -> list[Proposal]:
    """The proposal once without each side of every pair of options that cannot stand side by side in one
    model.

    The best of the parts is the best of the whole, and the bound of each part holds for its share.
    """
    parts = [proposal]
    for pair in conflicts:
        parts = [_without(part, option) for part in parts for option in pair]
    return parts


def _without(proposal: Proposal, option: str) -> Proposal:
    """The proposal with an option of the linears left out, and what requires it; sites that offer nothing
    else keep it.
    """
    refused = Declined(
        site="",
        kind="linear",
        option=option,
        by="quantize",
        reason=Unsupported("{name} runs all or none so", (proposal.backend,)),
    )
    choices, gone = [], set()
    for choice in proposal.choices:
        kept = tuple(o for o in choice.options if not (choice.kind == "linear" and o.name == option))
        if kept and len(kept) < len(choice.options):
            gone.add(choice.site)
        choices.append(replace(choice, options=kept or choice.options))
    possible = [
        replace(
            choice,
            options=tuple(
                o
                for o in choice.options
                if not any(r in gone and set(a) == {option} for r, a in o.requires.items())
            ),
        )
        for choice in choices
    ]
    return replace(proposal, choices=tuple(possible), declined=(*proposal.declined, refused))


def _certificate(solution: planner.Solution, constraints: Constraints) -> Certificate:
    return Certificate(
        status=solution.status,
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        sites=solution.sites,
        alternatives=solution.alternatives,
        seconds=solution.seconds,
        solver=solution.solver,
        rounds=constraints.round,
        error_scale=constraints.error_scale,
        rounding_scale=constraints.rounding_scale,
    )
