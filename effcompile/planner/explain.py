"""`why_not`: what would happen if a site took another option than the one chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from effcompile.core.errors import InfeasibleError
from effcompile.planner.infeasible import Describe, plain
from effcompile.planner.problem import Problem, Solution, check
from effcompile.planner.solver import solve_checked


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The answer to "why not this option?".

    Attributes:
        feasible: some choice within the limits takes the option.
        difference: objective of the best such choice minus the solution's; None where not feasible. Negative only
            within the gap that was left open.
        binding: the limits that speak against it: those that cannot hold with it, or, where it is feasible, those
            that would be exceeded by taking it and changing nothing else.
        text: all of it in a sentence.
    """

    site: str
    option: str
    feasible: bool
    difference: float | None
    binding: tuple[str, ...]
    text: str


def why_not(
    problem: Problem,
    solution: Solution,
    site: str,
    option: str,
    *,
    gap: float = 0.001,
    timeout: float = 10.0,
    describe: Describe | None = None,
) -> WhyNot:
    """Solve again with the option forced at the site, and compare.

    `describe` also words the difference of the objective, as resource "objective".

    Raises:
        UsageError: malformed problem. UnknownNameError: no such site, or no such option there.
    """
    check(problem)
    forced, words = problem.alternative(site, option), describe or plain
    taken = solution.choice[site]
    if taken == option:
        return WhyNot(site=site, option=option, feasible=True, difference=0.0, binding=(), text=f"{site} = {option} is what was chosen.")
    try:
        other = solve_checked(replace(problem, sites={**problem.sites, site: (forced,)}), gap=gap, timeout=timeout)
    except InfeasibleError as error:
        text = f"{site} = {option} is not possible. {error}"
        return WhyNot(site=site, option=option, feasible=False, difference=None, binding=error.binding, text=text)
    difference = float(problem.cost(other.choice) - problem.cost(solution.choice))
    binding = _exceeded(problem, solution, site, option)
    text = _sentence(f"{site} = {option}", taken, difference, binding, words, _needs(problem, solution, site, option))
    return WhyNot(site=site, option=option, feasible=True, difference=difference, binding=binding, text=text)


def _exceeded(problem: Problem, solution: Solution, site: str, option: str) -> tuple[str, ...]:
    swapped = {**solution.choice, site: option}
    return tuple(r for r, limit in problem.limits.items() if problem.used(swapped, r) > Fraction(limit))


def _needs(problem: Problem, solution: Solution, site: str, option: str) -> str:
    """What the swap alone would break besides the limits."""
    broken = problem.violations({**solution.choice, site: option})
    ties = [line for line in broken if " requires " in line]
    return f"; {ties[0]}" if ties else ""


def _sentence(what: str, taken: str, difference: float, binding: tuple[str, ...], words: Describe, needs: str) -> str:
    if difference > 0:
        price = f"the best plan with it is worse by {words('objective', difference)}"
    elif difference == 0:
        price = "the best plan with it is equally good"
    else:
        price = f"the best plan with it is better by {words('objective', -difference)}, within the gap that was left unproven"
    limits = f"; in place of {taken} alone it would exceed the limit on {' and '.join(binding)}, so others must give way" if binding else ""
    return f"{what} is possible, but {price}{limits}{needs}." if difference > 0 else f"{what} is possible: {price}{limits}{needs}."
