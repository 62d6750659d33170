"""Find, then prove: the loop between the Lagrangian heuristic and z3.

Where what was found is further above the bound than asked, the problem is branched on once (`_decided`): for
a group g with configurations c,

    optimum = min_c optimum(x_gc = 1) ≥ min_c max_λ L_c(λ)

with L_c as in dual.py. A target is refuted where it is for every c, by multipliers of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from effcompile.planner.certify import Verdict, Weights, refute, restrict, select, surrogate_bound
from effcompile.planner.dual import Dual, Scaled, maximise_dual, reduced_costs, scaled
from effcompile.planner.primal import polish
from effcompile.planner.reduce import Reduced

_MULTIPLIER_BITS = 48
_STARTS = 4  # choices met in the dual that are polished
_BESIDE = 1.001  # multiplier at which the groups that no single multiplier decides are told


#: A problem, and weights of its limits with which its bound is proven.
Part = tuple[Reduced, Weights]


@dataclass(frozen=True, slots=True)
class SolverOutcome:
    """The best choice found and the proven bound, in the reduced problem's integers, base included."""

    choice: Mapping[str, str]
    value: int
    bound: int


class Impossible(Exception):  # noqa: N818 — an answer, not a fault
    """No choice is feasible: refuted by z3, or by one limit that the least of every group exceeds already."""


class Undecided(Exception):  # noqa: N818
    """Neither a feasible choice nor a proof that there is none before the deadline."""


def optimise(reduced: Reduced, *, base: int, gap: float, deadline: float) -> SolverOutcome:
    """The least Σ vector[0] + base, proven to `gap` · |objective| unless the deadline comes first.

    Raises:
        Impossible: proven infeasible. Undecided: the deadline came before any feasible choice.
    """
    reduced = restrict(reduced)
    if any(not group for group in reduced.groups) or (
        not reduced.groups and min(reduced.slack, default=0) < 0
    ):
        raise Impossible  # some row, even at the least of every group, is exceeded
    problem = scaled(reduced)
    dual = maximise_dual(problem)
    weights = _weights(problem, dual, objective=True)
    best = _first(reduced, problem, dual, deadline)
    lower = surrogate_bound(reduced, weights)
    assert lower is not None
    # floor of the gap: never looser than asked
    wanted = lambda value: value - int(Fraction(gap) * abs(value + base))  # noqa: E731
    parts: list[Part] = [(reduced, weights)]
    if lower < wanted(reduced.sums(best)[0]):
        best, branches = _decided(reduced, problem, dual, best, (time.monotonic() + deadline) / 2)
        parts = branches or parts
        lower = max(lower, min(bound for part in parts if (bound := surrogate_bound(*part)) is not None))
    while True:
        value = reduced.sums(best)[0]
        target = wanted(value)
        if lower >= target:
            target = min(lower, value)
        verdict = _refute_all(parts, target, deadline)
        if verdict.answer == "refuted":
            return SolverOutcome(reduced.choice(best), value + base, target + base)
        if verdict.answer == "unknown" or verdict.reduced is None:
            return SolverOutcome(reduced.choice(best), value + base, min(lower, value) + base)
        best = _better(reduced, problem, dual, _lift(reduced, verdict.reduced, verdict.picks))


def _first(reduced: Reduced, problem: Scaled, dual: Dual, deadline: float) -> list[int]:
    """A feasible choice: polished from the dual's, else from the leanest in the limits' own dual, else from
    z3.
    """
    if not reduced.groups:
        return []
    found = [p for picks in dual.picks[:_STARTS] if (p := polish(reduced, problem, picks, dual.multipliers))]
    if found:
        return min(found, key=lambda p: reduced.sums(p)[0])
    lean = maximise_dual(problem, weight=0.0, box=1.0)
    for picks in lean.picks:
        if mended := polish(reduced, problem, picks, lean.multipliers, weight=0.0):
            return mended
    verdict = refute(reduced, None, (_weights(problem, lean, objective=False),), deadline)
    if verdict.answer == "refuted":
        raise Impossible
    if verdict.reduced is None:
        raise Undecided
    return _better(reduced, problem, dual, _lift(reduced, verdict.reduced, verdict.picks))


def _decided(
    reduced: Reduced, problem: Scaled, dual: Dual, best: list[int], until: float
) -> tuple[list[int], list[Part]]:
    """The best choice, and the problem in parts: one for each configuration of the group that matters most
    among those that the multipliers leave open, with multipliers of its own for all others.

    Where one group takes most of a limit (a head of a large vocabulary), what is cheapest on either side of
    the multipliers is far from the limit, single moves do not lead from there to the best, and the bound is
    as far below it. To branch once on that group is exact: a choice has one of its configurations. Of a group
    that has too many for the time until `until` there are no parts.
    """
    below, above = (
        [group.index(min(group)) for group in reduced_costs(problem, [f * m for m in dual.multipliers])]
        for f in (1 / _BESIDE, _BESIDE)
    )
    moved = lambda g: abs(problem.groups[g][below[g]][0] - problem.groups[g][above[g]][0])  # noqa: E731
    largest = max(range(len(reduced.groups)), key=moved)
    everything: list[Sequence[int]] = [range(len(group)) for group in reduced.groups]
    parts: list[Part] = []
    for index in everything[largest]:
        if time.monotonic() > until:
            return best, []
        part = select(reduced, [*everything[:largest], [index], *everything[largest + 1 :]])
        of_part = scaled(part)
        own = maximise_dual(of_part)
        parts.append((part, _weights(of_part, own, objective=True)))
        for picks in own.picks[:_STARTS]:
            if (found := polish(part, of_part, picks, own.multipliers)) is not None:
                lifted = _lift(reduced, part, found)
                best = min(best, lifted, key=lambda choice: reduced.sums(choice)[0])
    return best, parts


def _refute_all(parts: Sequence[Part], target: int, deadline: float) -> Verdict:
    """`refute` of a problem that is in parts."""
    for part, weights in parts:
        verdict = refute(part, target, (weights,), deadline)
        if verdict.answer != "refuted":
            return verdict
    return Verdict("refuted")


def _better(reduced: Reduced, problem: Scaled, dual: Dual, picks: list[int]) -> list[int]:
    improved = polish(reduced, problem, picks, dual.multipliers)
    return improved if improved and reduced.sums(improved)[0] <= reduced.sums(picks)[0] else picks


def _lift(whole: Reduced, part: Reduced, picks: Sequence[int]) -> list[int]:
    """The same choice in the indices of the problem that `part` was restricted from."""
    return [w.index(p[i]) for w, p, i in zip(whole.groups, part.groups, picks, strict=True)]


def _weights(problem: Scaled, dual: Dual, *, objective: bool) -> Weights:
    """Integers in the ratio of the multipliers: λ_r is per unit of Scaled, so p_r / Q = λ_r · size_0 /
    size_r.
    """
    ratios = [
        Fraction(m) * problem.sizes[0] / s for m, s in zip(dual.multipliers, problem.sizes[1:], strict=True)
    ]
    top = max([Fraction(1) if objective else Fraction(0), *ratios])
    unit = Fraction(1 << _MULTIPLIER_BITS) / top if top else Fraction(0)
    spread = min([Fraction(1) if objective else top, *(r for r in ratios if r)]) if top else Fraction(1)
    unit *= ceil(top / spread) if spread else 1
    return (round(unit) if objective else 0, *(round(r * unit) for r in ratios))
