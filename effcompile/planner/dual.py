"""Lagrangian bound and multipliers of the reduced problem, by cutting planes.

For multipliers λ ≥ 0 weak duality gives (Everett 1963; Kellerer, Pferschy, Pisinger, *Knapsack Problems*
2004, ch. 11)

    L(λ) = Σ_g min_c (c_gc + Σ_r λ_r u_grc) − Σ_r λ_r slack_r  ≤  optimum          (`_price`)

max_λ L(λ) is found by Kelley's cutting planes: every priced choice x gives θ ≤ c(x) + Σ_r λ_r (u_r(x) −
slack_r); z3 maximises θ over the handful of cuts and λ in a box (`_master`). Work here is in floats with each
row divided by its own size: λ is only advice. What is proven is proven from integers rounded out of λ, in
certify.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import z3

from effcompile.planner.ask import answered
from effcompile.planner.reduce import Reduced

_ROUNDS = 40
_AMPLE = 4  # a limit this many times the largest total never binds, so a larger one need not be told apart
_BOX = 1e4  # λ in normalised units; a multiplier this large is never needed once the limit can hold


@dataclass(frozen=True, slots=True)
class Scaled:
    """The reduced problem in floats: rows divided by their size, each group's values as (objective,
    *resources).
    """

    groups: tuple[tuple[tuple[float, ...], ...], ...]
    slack: tuple[float, ...]
    sizes: tuple[int, ...]  # what each dimension was divided by


@dataclass(frozen=True, slots=True)
class Dual:
    """Multipliers in Scaled's units, the bound they give, and the choices met on the way, best multipliers
    first.
    """

    multipliers: tuple[float, ...]
    bound: float
    picks: tuple[tuple[int, ...], ...]


def scaled(reduced: Reduced) -> Scaled:
    """Divide each dimension by its limit or, where that is larger, by the largest total it can reach.

    Every quotient stays below 2^21 whatever the exponents of the floats: tiny limits and ample ones are
    capped.
    """
    sizes = [1] * (1 + len(reduced.slack))
    for group in reduced.groups:
        for d in range(len(sizes)):
            sizes[d] += max(abs(c.vector[d]) for c in group)
    for r, slack in enumerate(reduced.slack):
        sizes[r + 1] = min(sizes[r + 1], max(slack, sizes[r + 1] >> 20, 1))
    groups = tuple(
        tuple(tuple(v / s for v, s in zip(c.vector, sizes, strict=True)) for c in group)
        for group in reduced.groups
    )
    return Scaled(
        groups,
        tuple(min(v, _AMPLE * s) / s for v, s in zip(reduced.slack, sizes[1:], strict=True)),
        tuple(sizes),
    )


def maximise_dual(problem: Scaled, *, weight: float = 1.0, box: float = _BOX) -> Dual:
    """Multipliers within 1e-5 of the best bound, or the best of 40 rounds.

    `weight` 0 leaves the objective out: a bound above 0 then says that the limits cannot hold together
    (Farkas).
    """
    zero = (0.0,) * len(problem.slack)
    cuts: list[tuple[float, tuple[float, ...]]] = []
    seen: list[tuple[int, ...]] = []
    best, multipliers = -float("inf"), zero
    trial = zero
    for _ in range(_ROUNDS):
        bound, picks = _price(problem, trial, weight)
        totals = _totals(problem, picks)
        cuts.append(
            (weight * totals[0], tuple(u - s for u, s in zip(totals[1:], problem.slack, strict=True)))
        )
        if bound > best:
            best, multipliers = bound, trial
            seen.insert(0, picks)
        else:
            seen.append(picks)
        if not problem.slack:
            break
        upper, trial = _master(cuts, len(problem.slack), box)
        if upper - best <= 1e-5 * max(abs(upper), 1e-9):
            break
    return Dual(multipliers, best, tuple(dict.fromkeys(seen)))


def reduced_costs(problem: Scaled, multipliers: Sequence[float], weight: float = 1.0) -> list[list[float]]:
    """weight·c + λ·u of every configuration."""
    weights = (weight, *multipliers)
    return [[sum(w * v for w, v in zip(weights, c, strict=True)) for c in group] for group in problem.groups]


def _price(problem: Scaled, multipliers: Sequence[float], weight: float) -> tuple[float, tuple[int, ...]]:
    bound = -sum(m * s for m, s in zip(multipliers, problem.slack, strict=True))
    picks = []
    for prices in reduced_costs(problem, multipliers, weight):
        low = min(prices)
        bound += low
        picks.append(prices.index(low))
    return bound, tuple(picks)


def _totals(problem: Scaled, picks: Sequence[int]) -> tuple[float, ...]:
    rows = [group[i] for group, i in zip(problem.groups, picks, strict=True)]
    return (
        tuple(sum(column) for column in zip(*rows, strict=True))
        if rows
        else (0.0,) * (1 + len(problem.slack))
    )


def _master(
    cuts: list[tuple[float, tuple[float, ...]]], count: int, box: float
) -> tuple[float, tuple[float, ...]]:
    """Maximise θ under the cuts, λ in [0, box]."""
    theta, lambdas = z3.Real("theta"), [z3.Real(f"lambda{r}") for r in range(count)]
    optimizer = z3.Optimize()
    for variable in lambdas:
        optimizer.add(variable >= 0, variable <= box)
    for cost, excess in cuts:
        optimizer.add(
            theta
            <= _rational(cost) + z3.Sum([_rational(e) * v for e, v in zip(excess, lambdas, strict=True)])
        )
    optimizer.maximize(theta)
    _, model = answered(optimizer)
    if model is None:
        raise z3.Z3Exception(b"no answer")
    return _value(model, theta), tuple(_value(model, v) for v in lambdas)


def _rational(value: float) -> z3.RatNumRef:
    return z3.Q(round(value * 2**36), 2**36)


def _value(model: z3.ModelRef, variable: z3.ArithRef) -> float:
    number = model.eval(variable, model_completion=True)
    return float(number.numerator_as_long() / number.denominator_as_long())
