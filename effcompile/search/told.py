"""What a solve says of every choice: the decision, and why each other option was not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from effcompile import planner
from effcompile.core.cost import Cost
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
    WithinGap,
)
from effcompile.ir.plan import Decision
from effcompile.passes import Choice, Declined, Option

#: What the quantity that is not minimised counts for: 100 MB as 10 µs, a second as a megabyte.
SECONDS_PER_BYTE, BYTES_PER_SECOND = 1e-13, 1e6


def objective(cost: Cost, goal: Goal) -> float:
    """Seconds, or bytes of weights and of what a choice keeps; a little of the other: of two equals the
    smaller or faster is taken.
    """
    if goal.minimize == "time":
        return cost.seconds + cost.peak_bytes * SECONDS_PER_BYTE
    return float(cost.peak_bytes) + cost.seconds * BYTES_PER_SECOND


def decision(choice: Choice, option: Option) -> Decision:
    """What was taken at a site."""
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
    smaller = max(0, _held(baseline.cost) - _held(option.cost))
    error = option.cost.error if option.cost.error_squared else 0.0
    return Gains(seconds=saved, bytes=smaller, error=error) if saved or smaller or error else None


def not_taken(
    choices: Sequence[Choice],
    chosen: Mapping[str, Option],
    problem: planner.Problem,
    solution: planner.Solution,
    goal: Goal,
) -> list[Declined]:
    """Every other option of every site, and why."""
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
    option: Option,
    site: str,
    chosen: Mapping[str, Option],
    problem: planner.Problem,
    solution: planner.Solution,
    goal: Goal,
) -> Reason:
    """Why this option lost: needs others that lost, not better, or better but over a limit if taken here with
    all else unchanged.
    """
    taken = chosen[site]
    for other, allowed in option.requires.items():
        if solution.choice.get(other) not in allowed:
            return Requires(site=other, options=tuple(allowed), offered=True)
    if objective(taken.cost, goal) <= objective(option.cost, goal):
        if goal.minimize == "memory":
            return NotSmaller(bytes=_held(option.cost), against=_held(taken.cost), than=taken.name)
        return NotFaster(seconds=option.cost.seconds, against=taken.cost.seconds, than=taken.name)
    for other, needing in chosen.items():
        if option.name not in needing.requires.get(site, (option.name,)):
            return Needed(site=other, option=needing.name)
    moved = {
        "error_squared": option.cost.error_squared - taken.cost.error_squared,
        "memory": float(_held(option.cost) - _held(taken.cost)),
    }
    for resource, limit in problem.limits.items():
        would_be = solution.resources[resource] + moved[resource]
        if would_be > limit:
            if resource == "memory":
                return OverBudget(needed=round(would_be), budget=round(limit))
            return OverError(error=would_be**0.5, limit=limit**0.5)
    return WithinGap(gap=solution.gap)


def _held(cost: Cost) -> int:
    """Bytes that are there throughout."""
    return cost.weight_bytes + cost.bytes_kept
