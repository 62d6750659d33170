"""`solve`: the least objective within all limits, with a certificate; `frontier`: objective against one
resource.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import z3

from effcompile.core import effort
from effcompile.core.errors import EffcompileError, UsageError
from effcompile.planner.infeasible import explain, with_objective
from effcompile.planner.optimise import Impossible, SolverOutcome, Undecided, optimise
from effcompile.planner.problem import OPTIMAL, SINGLE, UNPROVEN, Problem, Solution, check, rounded_down
from effcompile.planner.reduce import reduce_problem


class UndecidedError(EffcompileError):
    """Neither a feasible choice nor a proof that there is none was found in time."""


def solve(problem: Problem, *, gap: float = 0.01, timeout: float = 20.0) -> Solution:
    """Choose one alternative per site: least objective within all limits, proven to `gap` by z3.

    The method and its mathematics stand in reduce.py, dual.py and certify.py. A returned choice meets every
    limit in exact arithmetic on the floats as given.

    Args:
        problem: sites, alternatives and limits.
        gap: proof wanted, relative to |objective| (base included). 0 asks for the optimum itself.
        timeout: seconds; then the best choice found is returned, UNPROVEN, with the best bound proven.

    Raises:
        UsageError: the problem, the gap or the timeout is malformed.
        InfeasibleError: proven that nothing fits; `.binding` names the limits, `.nearest` what would fit.
        UndecidedError: neither a feasible choice nor a proof of there being none was found in time.
    """
    check(problem)
    if not (math.isfinite(gap) and gap >= 0) or not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(
            f"gap = {gap!r}, timeout = {timeout!r}: gap must be ≥ 0 (0.01 is 1 %), timeout a positive "
            "number of seconds."
        )
    return solve_checked(problem, gap=gap, timeout=timeout)


def solve_checked(problem: Problem, *, gap: float, timeout: float) -> Solution:
    """`solve` without the checks of its input.

    Raises:
        InfeasibleError: nothing is within the limits. UndecidedError: the solver stopped, or ran out of time,
            before it found a choice.
    """
    start, timeout = time.monotonic(), effort.allowed(timeout)
    reduced = reduce_problem(problem)
    base = int(Fraction(problem.base_objective) * reduced.scale)
    try:
        outcome = optimise(reduced, base=base, gap=gap, deadline=start + timeout)
    except Impossible:
        raise explain(problem, timeout) from None
    except z3.Z3Exception as error:
        # z3 is given no limit of memory of its own (memory_max_size): in z3 5.4 one ends in a segmentation
        # fault. See ask.py.
        said = str(error).strip()
        raise UndecidedError(
            "The solver stopped before it found a choice within the limits, perhaps for lack of memory: "
            f"{said}."
        ) from error
    except Undecided:
        raise UndecidedError(
            f"No choice within the limits was found in {timeout:g} s, nor a proof that there is none. "
            "Raise the timeout or loosen a limit."
        ) from None
    return _solution(problem, outcome, reduced.scale, gap, start)


def _solution(problem: Problem, outcome: SolverOutcome, scale: int, gap: float, start: float) -> Solution:
    choice = {site: outcome.choice[site] for site in problem.sites}
    if broken := problem.violations(choice):  # not a statement that `python -O` leaves out
        raise AssertionError(broken)
    value, bound = Fraction(outcome.value, scale), Fraction(outcome.bound, scale)
    proven = value - bound <= Fraction(gap) * abs(value)
    alternatives = sum(len(a) for a in problem.sites.values())
    effort.spend(took := time.monotonic() - start)
    return Solution(
        choice=choice,
        objective=float(value),
        bound=rounded_down(bound),
        gap=float(min((value - bound) / abs(value), Fraction(10**300))) if value else float(bound < 0),
        status=SINGLE if alternatives == len(problem.sites) else OPTIMAL if proven else UNPROVEN,
        sites=len(problem.sites),
        alternatives=alternatives,
        seconds=took,
        solver=f"z3 {z3.get_version_string()}",
        resources={r: float(problem.used(choice, r)) for r in problem.resource_names()},
    )


def frontier(
    problem: Problem, resource: str, points: int = 8, *, gap: float = 0.01, timeout: float = 20.0
) -> list[Solution]:
    """The Pareto front of the objective against one resource, by an epsilon-constraint sweep of its limit.

    From the least use of the resource that the other limits allow to the use of the unlimited optimum (or its
    limit): evenly spaced, geometrically where that spans more than a factor of 10. Sorted by the resource;
    each solution is cheaper than the one before. May return fewer than `points`; `timeout` is for the whole
    sweep.

    Raises:
        UsageError: fewer than two points, or a malformed problem. InfeasibleError: no point exists.
    """
    check(problem)
    if points < 2:
        raise UsageError(f"points = {points!r}: a frontier has at least 2.")
    share = timeout / (points + 1)
    top = solve_checked(problem, gap=gap, timeout=share)
    lean = solve_checked(with_objective(problem, resource), gap=min(gap, 1e-3), timeout=share)
    low, high = lean.resources.get(resource, 0.0), top.resources.get(resource, 0.0)
    found = [top]
    for limit in _spaced(low, high, points):
        ceiling = replace(
            problem, limits={**problem.limits, resource: _cover(problem, lean.choice, resource, limit)}
        )
        with suppress(UndecidedError):  # the point exists, but was not found in its share of the time
            found.append(solve_checked(ceiling, gap=gap, timeout=share))
    return _pareto(found, resource)


def _spaced(low: float, high: float, points: int) -> list[float]:
    """points − 1 limits from low up to, but without, high."""
    if high <= low:
        return []
    steps = [i / (points - 1) for i in range(points - 1)]
    if low > 0 and high / low > 10:
        return [low * (high / low) ** t for t in steps]
    return [low + (high - low) * t for t in steps]


def _cover(problem: Problem, lean: Mapping[str, str], resource: str, limit: float) -> float:
    """The limit, raised by an ulp where rounding put it below the leanest choice's exact use."""
    while Fraction(limit) < problem.used(lean, resource):
        limit = math.nextafter(limit, math.inf)
    return limit


def _pareto(found: list[Solution], resource: str) -> list[Solution]:
    front: list[Solution] = []
    for solution in sorted(found, key=lambda s: (s.resources.get(resource, 0.0), s.objective)):
        if not front or solution.objective < front[-1].objective:
            front.append(solution)
    return front
