"""Why nothing fits: the limits that clash, and the smallest value of each that would do."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction

from effcompile.core.causes import Contradiction, Limits
from effcompile.core.errors import InfeasibleError
from effcompile.planner.optimise import Impossible, Undecided, optimise
from effcompile.planner.problem import Alternative, Problem
from effcompile.planner.reduce import reduce_problem

_EXACT_SIZE = 150  # alternatives up to which the nearest limit is proven exactly; beyond, within _NEAR
_NEAR = Fraction(1, 1000)


def with_objective(problem: Problem, resource: str) -> Problem:
    """The same problem, minimising the use of a resource within the other limits."""
    sites = {
        site: tuple(replace(a, objective=a.resources.get(resource, 0.0)) for a in alternatives)
        for site, alternatives in problem.sites.items()
    }
    limits = {r: limit for r, limit in problem.limits.items() if r != resource}
    return replace(problem, sites=sites, limits=limits, base_objective=problem.base.get(resource, 0.0))


def explain(problem: Problem, timeout: float) -> InfeasibleError:
    """The error to raise for a problem proven infeasible.

    `binding` is an irreducible unsat core of the limits: proven impossible together, possible without any one
    of them. `nearest` is minimised per limit with the others unchanged, exactly or within 0.1 %; a limit that
    no value of its own would mend is left out.
    """
    if not _possible(replace(problem, limits={}), timeout):
        options = tuple(
            (site, a.name) for site, alternatives in problem.sites.items() for a in alternatives if a.requires
        )
        return InfeasibleError(Contradiction(options=options))
    core = dict(problem.limits)
    for resource in list(core):
        fewer = {r: limit for r, limit in core.items() if r != resource}
        if not _possible(replace(problem, limits=fewer), timeout):
            core = fewer
    nearest = {r: least for r in problem.limits if (least := smallest(problem, r, timeout)) is not None}
    clash = Limits(limits=tuple(core.items()), beside=len(problem.limits) - len(core))
    return InfeasibleError(clash, binding=tuple(core), nearest=nearest)


def smallest(problem: Problem, resource: str, timeout: float) -> float | None:
    """The smallest limit on a resource that is feasible within the other limits; None where there is none.

    Rounded up to a float, so that the value itself is feasible.
    """
    lean = with_objective(problem, resource)
    reduced = reduce_problem(lean)
    gap = 0 if sum(len(a) for a in problem.sites.values()) <= _EXACT_SIZE else _NEAR
    base = int(Fraction(lean.base_objective) * reduced.scale)
    try:
        outcome = optimise(reduced, base=base, gap=float(gap), deadline=time.monotonic() + min(5.0, timeout))
    except (Impossible, Undecided):
        return None
    exact = Fraction(outcome.value, reduced.scale)
    near = float(exact)
    return math.nextafter(near, math.inf) if Fraction(near) < exact else near


def _possible(problem: Problem, timeout: float) -> bool:
    """False only when proven infeasible."""
    try:
        optimise(
            reduce_problem(_without_objective(problem)), base=0, gap=1.0, deadline=time.monotonic() + timeout
        )
    except Impossible:
        return False
    except Undecided:
        return True
    return True


def _without_objective(problem: Problem) -> Problem:
    """Any feasible choice will do."""
    sites = {site: tuple(_free(a) for a in alternatives) for site, alternatives in problem.sites.items()}
    return replace(problem, sites=sites, base_objective=0.0)


def _free(alternative: Alternative) -> Alternative:
    return replace(alternative, objective=0.0)
