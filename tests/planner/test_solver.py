from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from brute import LIMITS, optimum, problems, realistic
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from effcompile.core.errors import InfeasibleError, UnknownNameError, UsageError
from effcompile.planner import (
    OPTIMAL,
    SINGLE,
    UNPROVEN,
    Alternative,
    Problem,
    certify,
    frontier,
    optimise,
    reduce,
    solve,
)

FEW = settings(max_examples=60, deadline=None)


def two_options(**fields: object) -> Problem:
    fast = Alternative(name="int8", objective=1.0, resources={"error_squared": 1e-4})
    slow = Alternative(name="fp32", objective=2.0)
    return Problem(
        **{"sites": {"a": (slow, fast), "b": (slow, fast)}, "limits": {"error_squared": 1e-4}, **fields}
    )


@FEW
@given(problem=problems(), gap=st.sampled_from([0.0, 0.01, 0.2]), group_limit=st.sampled_from([1, 3, 3000]))
def test_equals_brute_force_within_the_gap(problem: Problem, gap: float, group_limit: int) -> None:
    best = optimum(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "GROUP_LIMIT", group_limit)  # 1 leaves every tie to z3's branching
        if best is None:
            with pytest.raises(InfeasibleError):
                solve(problem, gap=gap)
            return
        solution = solve(problem, gap=gap)
    assert solution.status in (OPTIMAL, SINGLE)
    assert problem.violations(solution.choice) == []
    value = problem.cost(solution.choice)
    assert solution.objective == float(value)
    assert value - best <= Fraction(gap) * abs(value)
    assert Fraction(solution.bound) <= best
    assert solution.gap <= gap * (1 + 1e-12)
    assert all(Fraction(solution.resources[r]) <= Fraction(limit) for r, limit in problem.limits.items())


@FEW
@given(problem=problems(), resource=st.sampled_from(LIMITS), more=st.floats(0, 1e10))
def test_more_budget_never_costs_more(problem: Problem, resource: str, more: float) -> None:
    assume(resource in problem.limits and optimum(problem) is not None)
    wider = replace(problem, limits={**problem.limits, resource: problem.limits[resource] + more})
    assert solve(wider, gap=0).objective <= solve(problem, gap=0).objective


@pytest.mark.parametrize("seed", [0, 1])
def test_200_linears_are_proven_within_one_percent(seed: int) -> None:
    problem = realistic(200, seed)
    solution = solve(problem, gap=0.01)
    assert solution.status == OPTIMAL
    assert problem.violations(solution.choice) == []
    assert solution.bound <= solution.objective <= solution.bound / 0.99
    assert solution.alternatives == sum(map(len, problem.sites.values()))


def test_many_identical_sites_are_proven() -> None:
    options = tuple(
        Alternative(name=f"o{i}", objective=10.0 - i**0.5, resources={"memory": float(i * i)})
        for i in range(8)
    )
    problem = Problem(sites={f"layer{i}": options for i in range(100)}, limits={"memory": 1717.0})
    assert solve(problem, gap=1e-3).status == OPTIMAL


@pytest.mark.parametrize(("room", "head"), [(70.0, "wide"), (82.0, "narrow")])
def test_one_site_that_takes_most_of_a_limit_is_decided_and_proven(room: float, head: str) -> None:
    """A head of a large vocabulary beside 200 linears: no multiplier leads near the limit."""
    dice = random.Random(0)

    def linear() -> tuple[Alternative, ...]:
        error, gain = dice.uniform(0.5, 1.5), dice.uniform(0.5, 1.5)
        of = ((0.0, 0.0), (1.0, 0.02), (1.6, 0.3), (1.9, 1.0))
        return tuple(
            Alternative(name=f"{g}", objective=-gain * g, resources={"error": error * e}) for g, e in of
        )

    wide = Alternative(name="wide", objective=0.0, resources={"error": 0.0})
    narrow = Alternative(name="narrow", objective=-100.0, resources={"error": 60.0})
    sites = {f"s{at}": linear() for at in range(200)} | {"head": (wide, narrow)}
    problem = Problem(sites=sites, limits={"error": room}, base_objective=420.0)
    found = solve(problem, gap=1e-3)
    assert found.status == OPTIMAL and found.choice["head"] == head
    kept = {**sites, "head": tuple(each for each in (wide, narrow) if each.name != head)}
    other = solve(replace(problem, sites=kept), gap=1e-3)
    assert other.objective >= found.objective * (1 - 2e-3)


def test_a_long_chain_of_ties_is_solved() -> None:
    sites = {}
    for i in range(60):
        tie = {f"s{i - 1}": ("a", "b")} if i else {}
        cost = 1.0 + (i * 7 % 5) / 10
        sites[f"s{i}"] = (
            Alternative(name="a", objective=cost, resources={"memory": 3.0 + i % 3}),
            Alternative(name="b", objective=cost - 0.6, resources={"memory": 6.0}, requires=tie),
            Alternative(name="c", objective=cost + 0.5, resources={"memory": 1.0}),
        )
    problem = Problem(sites=sites, limits={"memory": 200.0})
    solution = solve(problem, gap=0.02)
    assert problem.violations(solution.choice) == []
    assert solution.status == OPTIMAL


def test_no_sites() -> None:
    solution = solve(Problem(sites={}, limits={"memory": 5.0}, base={"memory": 5.0}, base_objective=2.0))
    assert (solution.choice, solution.objective, solution.bound, solution.gap, solution.status) == (
        {},
        2.0,
        2.0,
        0.0,
        SINGLE,
    )
    with pytest.raises(InfeasibleError) as caught:
        solve(Problem(sites={}, limits={"memory": 4.0}, base={"memory": 5.0}))
    assert caught.value.nearest == {"memory": 5.0}


def test_the_deadline_leaves_a_feasible_choice_and_a_true_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = realistic(30)
    # what z3 answers at its timeout
    monkeypatch.setattr(optimise, "refute", lambda *_: certify.Verdict("unknown"))
    solution = solve(problem, gap=0.0, timeout=2.0)
    monkeypatch.undo()
    assert solution.status == UNPROVEN
    assert problem.violations(solution.choice) == []
    assert solution.bound <= solve(problem, gap=1e-3).objective <= solution.objective * (1 + 1e-3)


def test_a_resource_without_limit_is_reported_and_does_not_bind() -> None:
    solution = solve(two_options(limits={}))
    assert solution.choice == {"a": "int8", "b": "int8"}
    assert solution.resources == {"error_squared": 2e-4}


@FEW
@given(problem=problems(max_sites=4), resource=st.sampled_from(LIMITS))
def test_frontier_is_pareto_and_reaches_both_ends(problem: Problem, resource: str) -> None:
    assume(optimum(problem) is not None)
    front = frontier(problem, resource, points=4, gap=0)
    assert front[-1].objective == solve(problem, gap=0).objective
    for lean, rich in pairwise(front):
        assert lean.resources[resource] < rich.resources[resource]
        assert lean.objective > rich.objective
    for solution in front:
        assert problem.violations(solution.choice) == []


def test_numbers_of_any_exponent_are_exact() -> None:
    tiny = Alternative(name="tiny", objective=1e-300, resources={"memory": 1e-300})
    huge = Alternative(name="huge", objective=1.0, resources={"memory": -1e290})
    for limit, expected in ((0.0, "huge"), (1e-300, "tiny"), (1e299, "tiny")):
        problem = Problem(sites={"a": (huge, tiny)}, limits={"memory": limit})
        assert solve(problem, gap=0).choice == {"a": expected}


@pytest.mark.parametrize("bad", [1e301, math.nan, math.inf, -math.inf, "1", None, True])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    for problem in (
        two_options(limits={"error_squared": bad}),
        two_options(base={"memory": bad}),
        two_options(base_objective=bad),
        two_options(sites={"a": (Alternative(name="x", objective=bad),)}),
        two_options(sites={"a": (Alternative(name="x", objective=1.0, resources={"memory": bad}),)}),
    ):
        with pytest.raises(UsageError, match="must be a finite number"):
            solve(problem)


def test_malformed_problems_are_refused() -> None:
    one = Alternative(name="one", objective=1.0)
    with pytest.raises(UsageError, match="'a' has no alternatives"):
        solve(two_options(sites={"a": ()}))
    with pytest.raises(UsageError, match="two alternatives named 'one'"):
        solve(two_options(sites={"a": (one, one)}))
    with pytest.raises(UnknownNameError, match="No site is named 'bb'"):
        solve(two_options(sites={"a": (replace(one, requires={"bb": ("one",)}),), "b": (one,)}))
    with pytest.raises(UnknownNameError, match="Did you mean 'one'"):
        solve(two_options(sites={"a": (replace(one, requires={"b": ("onee",)}),), "b": (one,)}))
    for options in ({"gap": -0.1}, {"gap": math.nan}, {"timeout": 0.0}, {"timeout": math.inf}):
        with pytest.raises(UsageError, match="gap must be"):
            solve(two_options(), **options)
    with pytest.raises(UsageError, match="at least 2"):
        frontier(two_options(), "error_squared", points=1)


@pytest.mark.parametrize("resource", ["error_squared", "weight_bytes"])
def test_frontier_of_a_large_problem_is_proven_to_its_lean_end(resource: str) -> None:
    problem = realistic(24)
    front = frontier(problem, resource, points=4, timeout=60)
    assert len(front) == 4
    assert {s.status for s in front} == {OPTIMAL}
    assert all(problem.violations(s.choice) == [] for s in front)
