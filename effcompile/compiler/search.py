"""Passes propose, z3 decides: one solve per backend, every choice of every pass in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from effcompile import planner
from effcompile.backends.base import Backend
from effcompile.compiler.machine import BASELINE, Machine
from effcompile.core.causes import Limits, MachineTooSmall
from effcompile.core.cost import Cost, Provenance, total
from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.core.reasons import (
    Gains,
    Kept,
    Needed,
    NotFaster,
    NotSmaller,
    OverBudget,
    OverError,
    Reason,
    Requires,
    Unsupported,
    WithinGap,
)
from effcompile.estimate.nodes import estimate
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.estimate.timeline import Timeline, timeline
from effcompile.ir.formats import WeightFormat
from effcompile.ir.plan import Certificate, Decision, Plan, Totals
from effcompile.ir.program import Program
from effcompile.machine.target import Target
from effcompile.passes import Choice, Context, Declined, Option, Pass, propose_all

#: The solver proves that nothing is cheaper by more than this share.
GAP = 0.01

#: What the quantity that is not minimised counts for: 100 MB as 10 µs, a second as a megabyte.
SECONDS_PER_BYTE, BYTES_PER_SECOND = 1e-13, 1e6


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Everything that may be decided for one backend, and what no choice changes."""

    backend: str
    choices: tuple[Choice, ...]
    declined: tuple[Declined, ...]
    rest: Cost  # nodes that no choice covers; parameters that no choice stores; peak activations
    provenance: Provenance

    def at_most_bytes(self) -> int:
        """Bytes with the largest option everywhere."""
        largest = (max(option.cost.weight_bytes for option in choice.options) for choice in self.choices)
        return self.rest.weight_bytes + self.rest.bytes_kept + sum(largest)

    def problem(self, goal: Goal) -> planner.Problem:
        """As plain numbers for the planner."""
        limits: dict[str, float] = {"error_squared": (goal.max_error or 0.0) ** 2}
        if goal.memory is not None:
            limits["memory"] = float(goal.memory)
        return planner.Problem(
            sites={choice.site: tuple(_alternative(option, goal) for option in choice.options) for choice in self.choices},
            limits=limits,
            base={"memory": float(self.rest.weight_bytes + self.rest.bytes_kept)},
            base_objective=_objective(self.rest, goal),
        )


@dataclass(frozen=True, kw_only=True)
class Search:
    """One model, one goal, one machine; `plan_for` answers for each backend, again with corrected errors."""

    program: Program
    goal: Goal
    machine: Machine
    passes: tuple[Pass, ...]
    formats: tuple[WeightFormat, ...]  # what a dense linear may be held in
    sensitivity: Sensitivity
    calibration_inputs: str
    notes: tuple[Reason, ...] = ()
    _memory: list[Timeline] = field(default_factory=list)
    _proposals: dict[str, Proposal] = field(default_factory=dict)

    def plan_for(self, backend: Backend, *, error_scale: float = 1.0, rounds: int = 1, notes: tuple[Reason, ...] = ()) -> Plan:
        """The best plan on one backend, predicted and certified.

        Args:
            backend: where it is to run.
            error_scale: measured over predicted squared error of an earlier round.
            rounds: which solve this is.
            notes: what the earlier rounds found.

        Raises:
            InfeasibleError: nothing meets the goal on this backend.
        """
        proposal = self._proposal(backend)
        scaled = replace(proposal, choices=tuple(_scaled(choice, error_scale) for choice in proposal.choices))
        plans: list[Plan] = []
        infeasible: list[InfeasibleError] = []
        for part in _without_conflicts(scaled, backend.conflicts):
            goal = self._on_the_machine(part)
            problem = part.problem(goal)
            try:
                solution = planner.solve(problem, gap=GAP)
            except InfeasibleError as error:
                error = _with_errors(error)
                infeasible.append(error if goal is self.goal else too_large(error, self.machine.target))
                continue
            plans.append(self._plan(part, problem, solution, error_scale, rounds, notes))
        if not plans:
            raise infeasible[0]
        return min(plans, key=lambda plan: plan.certificate.objective)

    def frontier(self, backend: Backend, points: int) -> list[Plan]:
        """Plans along the memory-time Pareto front on one backend, least memory first."""
        proposal = self._proposal(backend)
        goal = self._on_the_machine(proposal)
        problem = proposal.problem(goal)
        try:
            solutions = planner.frontier(problem, "memory", points)
        except InfeasibleError as error:
            error = _with_errors(error)
            raise error if goal is self.goal else too_large(error, self.machine.target) from error
        return [self._plan(proposal, problem, solution, 1.0, 1, ()) for solution in solutions]

    def _on_the_machine(self, proposal: Proposal) -> Goal:
        """The goal with the machine's memory as its limit, where that is less than what was allowed and what may be needed."""
        size, allowed = self.machine.target.memory_bytes, self.goal.memory
        fits = size <= 0 or (allowed is not None and allowed <= size) or proposal.at_most_bytes() <= size
        return self.goal if fits else replace(self.goal, memory=size)

    def timeline(self) -> Timeline:
        """The captured graph's memory over one call."""
        if not self._memory:
            self._memory.append(timeline(self.program))
        return self._memory[0]

    def baseline(self) -> Totals:
        """Predicted figures of the unplanned model in stock torch."""
        seconds = estimate(self.program, self.machine.target, BASELINE).seconds
        return Totals(seconds=seconds, weight_bytes=self.program.weight_bytes(), peak_bytes=self.timeline().peak_bytes, error=0.0)

    def _proposal(self, backend: Backend) -> Proposal:
        name = backend.name
        if name not in self._proposals:
            context = Context(
                goal=self.goal, target=self.machine.target, backend=name, sensitivity=self.sensitivity.errors,
                formats=self.formats, lacks=backend.lacks,
            )  # fmt: skip
            choices, declined = propose_all(self.passes, self.program, context)
            rest = self._rest(name, choices)
            provenance = total([o.cost for c in choices for o in c.options]).provenance
            self._proposals[name] = Proposal(
                backend=name, choices=tuple(choices), declined=tuple(declined), rest=rest, provenance=provenance
            )
        return self._proposals[name]

    def _rest(self, backend: str, choices: Sequence[Choice]) -> Cost:
        """Seconds of nodes that no choice covers, bytes of parameters that no choice stores, peak activations."""
        covered = frozenset[fx.Node]().union(*(choice.covers for choice in choices))
        predicted = estimate(self.program, self.machine.target, backend, overrides=dict.fromkeys(covered, 0.0))
        stored = sum(choice.option(choice.baseline).cost.weight_bytes for choice in choices)
        memory = self.timeline()
        return Cost(
            seconds=predicted.seconds,
            weight_bytes=max(memory.weight_bytes - stored, 0),
            bytes_kept=memory.activation_bytes + memory.input_bytes,
        )

    def _plan(
        self,
        proposal: Proposal,
        problem: planner.Problem,
        solution: planner.Solution,
        error_scale: float,
        rounds: int,
        notes: tuple[Reason, ...],
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
            decisions=tuple(_decision(choice, chosen[choice.site]) for choice in proposal.choices),
            declined=(*proposal.declined, *_not_taken(proposal.choices, chosen, problem, solution, self.goal)),
            certificate=_certificate(solution, rounds, error_scale),
            baseline=self.baseline(),
            predicted=Totals(
                seconds=cost.seconds,
                weight_bytes=cost.weight_bytes,
                peak_bytes=cost.weight_bytes + cost.bytes_kept,
                error=cost.error,
            ),
            inputs=describe_inputs(self.program),
            calibration_inputs=self.calibration_inputs,
            notes=(*self.notes, *notes),
            versions=versions(),
        )


def fingerprint(program: Program) -> str:
    """A short hash of the graph's operators, constants' shapes and inputs: a plan fits only the model it was made for."""
    digest = hashlib.sha256()
    for spec in program.inputs:
        digest.update(f"{spec.name}{spec.dtype}{len(spec.shape)};".encode())
    for node in program.graph.nodes:
        tensor = program.tensor(node)
        digest.update(f"{node.op}:{node.target}:{tuple(tensor.shape) if tensor is not None else ''};".encode())
    return digest.hexdigest()[:16]


def describe_inputs(program: Program) -> tuple[str, ...]:
    """One line for each input with its example sizes: `input_ids [batch=1 × seq=128] int64`."""
    lines = []
    for spec, tensor in zip(program.inputs, program.flat_inputs(), strict=True):
        dims = [str(size) if isinstance(dim, int) else f"{dim}={size}" for dim, size in zip(spec.shape, tensor.shape, strict=True)]
        lines.append(f"{spec.name} [{' × '.join(dims)}] {spec.dtype}")
    return tuple(lines)


def too_large(error: InfeasibleError, target: Target) -> InfeasibleError:
    """The error where the limit on memory is the machine's own: asking for more of it is no remedy."""
    nearest = {limit: value for limit, value in error.nearest.items() if limit != "memory"}
    machine = MachineTooSmall(target=target.name, memory_bytes=target.memory_bytes, needed=error.needed or None)
    return InfeasibleError(machine, *error.why, binding=error.binding, nearest=nearest)


def explain_infeasible(errors: Mapping[str, InfeasibleError]) -> InfeasibleError:
    """One error for a goal that no backend meets: the nearest misses."""
    return min(errors.values(), key=lambda e: sum(e.nearest.values(), start=0.0))


def _with_errors(error: InfeasibleError) -> InfeasibleError:
    """With errors as errors, and not as the squares that add up."""
    limit, root = {"error_squared": "max_error"}, {"error_squared": math.sqrt}
    nearest = {limit.get(name, name): root.get(name, float)(value) for name, value in error.nearest.items()}
    why = tuple(
        replace(cause, limits=tuple((limit.get(name, name), root.get(name, float)(value)) for name, value in cause.limits))
        if isinstance(cause, Limits) else cause
        for cause in error.why
    )  # fmt: skip
    binding = tuple(limit.get(name, name) for name in error.binding)
    return InfeasibleError(*why, binding=binding, nearest=nearest, untried=error.untried)


def _alternative(option: Option, goal: Goal) -> planner.Alternative:
    cost = option.cost
    return planner.Alternative(
        name=option.name,
        objective=_objective(cost, goal),
        resources={"error_squared": cost.error_squared, "memory": float(cost.weight_bytes)},
        requires=option.requires,
    )


def _objective(cost: Cost, goal: Goal) -> float:
    """Seconds or weight bytes; a little of the other, so that of two equally good options the smaller or faster is taken."""
    if goal.minimize == "time":
        return cost.seconds + cost.weight_bytes * SECONDS_PER_BYTE
    return float(cost.weight_bytes) + cost.seconds * BYTES_PER_SECOND


def _scaled(choice: Choice, factor: float) -> Choice:
    if factor == 1.0:
        return choice
    return replace(choice, options=tuple(replace(o, cost=o.cost.with_error_scaled(factor)) for o in choice.options))


def _without_conflicts(proposal: Proposal, conflicts: Sequence[tuple[str, str]]) -> list[Proposal]:
    """The proposal once without each side of every pair of options that cannot stand side by side in one model.

    The best of the parts is the best of the whole, and the bound of each part holds for its share.
    """
    parts = [proposal]
    for pair in conflicts:
        parts = [_without(part, option) for part in parts for option in pair]
    return parts


def _without(proposal: Proposal, option: str) -> Proposal:
    """The proposal with an option of the linears left out, and what requires it; sites that offer nothing else keep it."""
    refused = Declined(site="", kind="linear", option=option, by="quantize", reason=Unsupported(f"{proposal.backend} runs all or none so"))
    choices, gone = [], set()
    for choice in proposal.choices:
        kept = tuple(o for o in choice.options if not (choice.kind == "linear" and o.name == option))
        if kept and len(kept) < len(choice.options):
            gone.add(choice.site)
        choices.append(replace(choice, options=kept or choice.options))
    possible = [
        replace(
            choice, options=tuple(o for o in choice.options if not any(r in gone and set(a) == {option} for r, a in o.requires.items()))
        )
        for choice in choices
    ]
    return replace(proposal, choices=tuple(possible), declined=(*proposal.declined, refused))


def _decision(choice: Choice, option: Option) -> Decision:
    baseline = next((o for o in choice.options if o.name == choice.baseline), option)
    return Decision(
        site=choice.site,
        kind=choice.kind,
        option=option.name,
        form=option.form,
        baseline=choice.baseline,
        by=option.by,
        cost=option.cost,
        baseline_cost=baseline.cost,
        why=_why(option, baseline, len(choice.options)),
        note=option.note,
    )


def _why(option: Option, baseline: Option, alternatives: int) -> Reason | None:
    if option is baseline:
        return Kept(options=alternatives)
    saved = baseline.cost.seconds - option.cost.seconds
    smaller = max(0, baseline.cost.weight_bytes - option.cost.weight_bytes)
    error = option.cost.error if option.cost.error_squared else 0.0
    return Gains(seconds=saved, bytes=smaller, error=error) if saved or smaller or error else None


def _not_taken(
    choices: Sequence[Choice], chosen: Mapping[str, Option], problem: planner.Problem, solution: planner.Solution, goal: Goal
) -> list[Declined]:
    return [
        Declined(
            site=choice.site,
            kind=choice.kind,
            option=option.name,
            by=option.by,
            reason=_reason(option, choice.site, chosen, problem, solution, goal),
            cost=option.cost,
        )
        for choice in choices
        for option in choice.options
        if option.name != chosen[choice.site].name
    ]


def _reason(
    option: Option, site: str, chosen: Mapping[str, Option], problem: planner.Problem, solution: planner.Solution, goal: Goal
) -> Reason:
    """Why this option lost: needs others that lost, not better, or better but over a limit if taken here with all else unchanged."""
    taken = chosen[site]
    for other, allowed in option.requires.items():
        if solution.choice.get(other) not in allowed:
            return Requires(site=other, options=tuple(allowed), offered=True)
    if _objective(taken.cost, goal) <= _objective(option.cost, goal):
        if goal.minimize == "memory":
            return NotSmaller(bytes=option.cost.weight_bytes, against=taken.cost.weight_bytes, than=taken.name)
        return NotFaster(seconds=option.cost.seconds, against=taken.cost.seconds, than=taken.name)
    for other, needing in chosen.items():
        if option.name not in needing.requires.get(site, (option.name,)):
            return Needed(site=other, option=needing.name)
    moved = {
        "error_squared": option.cost.error_squared - taken.cost.error_squared,
        "memory": float(option.cost.weight_bytes - taken.cost.weight_bytes),
    }
    for resource, limit in problem.limits.items():
        would_be = solution.resources[resource] + moved[resource]
        if would_be > limit:
            if resource == "memory":
                return OverBudget(needed=round(would_be), budget=round(limit))
            return OverError(error=would_be**0.5, limit=limit**0.5)
    return WithinGap(gap=solution.gap)


def _certificate(solution: planner.Solution, rounds: int, error_scale: float) -> Certificate:
    return Certificate(
        status=solution.status,
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        sites=solution.sites,
        alternatives=solution.alternatives,
        seconds=solution.seconds,
        solver=solution.solver,
        rounds=rounds,
        error_scale=error_scale,
    )


def versions() -> dict[str, str]:
    """Package → version, of what a plan's figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("effcompile", "torch", "onnxruntime", "openvino", "z3-solver", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
