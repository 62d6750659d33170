from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from remat_brute import MB, chain_optimum, chains, instants, realistic_chain

from effcompile.core.errors import InfeasibleError, UnknownNameError, UsageError
from effcompile.planner import OPTIMAL, SINGLE, UNPROVEN
from effcompile.planner.remat import (
    ChainProblem,
    chain_frontier,
    frontier_budgets,
    smallest_budget,
    solve_chain,
)
from effcompile.planner.remat import chain as chain_module
from effcompile.planner.remat.count import CountVerdict, _System
from effcompile.planner.remat.links import variants
from effcompile.planner.remat.walk import Walk, walk

FEW = settings(max_examples=80, deadline=None)
LONG = 600.0  # seconds: a test waits for the proof however loaded the machine is


@FEW
@given(problem=chains(), gap=st.sampled_from([0.0, 0.05]), by_z3_alone=st.booleans())
def test_equals_brute_force_within_the_gap(problem: ChainProblem, gap: float, by_z3_alone: bool) -> None:
    best, least = chain_optimum(problem)
    assert smallest_budget(problem) == least
    with pytest.MonkeyPatch.context() as patch:
        if by_z3_alone:
            patch.setattr(chain_module, "walk", lambda *_, **__: Walk(None, False))
        if best == float("inf"):
            with pytest.raises(InfeasibleError) as caught:
                solve_chain(problem, reference_seconds=10.0, gap=gap, timeout=LONG)
            assert caught.value.nearest == {"memory": least}
            return
        solution = solve_chain(problem, reference_seconds=10.0, gap=gap, timeout=LONG)
    loads = instants(problem, solution.choice, solution.groups)
    assert loads is not None
    assert solution.peak == max(loads.values())
    assert problem.budget is None or solution.peak <= problem.budget
    assert solution.smallest == least
    assert solution.bound <= best <= solution.seconds
    assert solution.seconds - best <= gap * 10.0
    assert solution.gap == (solution.seconds - solution.bound) / 10.0 <= gap
    assert solution.status in (OPTIMAL, SINGLE)


@FEW
@given(problem=chains(), more=st.integers(0, 20))
def test_more_budget_never_takes_more_seconds(problem: ChainProblem, more: int) -> None:
    low = smallest_budget(problem)
    first = solve_chain(replace(problem, budget=low + more // 3), reference_seconds=10.0, gap=0, timeout=LONG)
    second = solve_chain(replace(problem, budget=low + more), reference_seconds=10.0, gap=0, timeout=LONG)
    assert second.seconds <= first.seconds


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("kinds", [1, 2, 6])
def test_within_the_gap_of_an_exact_walk(kinds: int, share: float) -> None:
    problem = realistic_chain(12, kinds, options=8, groupable=False)
    low, high = frontier_budgets(problem, 2)
    problem = replace(problem, budget=int(low + share * (high - low)))
    solution = solve_chain(problem, reference_seconds=8.0, gap=0.01, timeout=LONG)
    assert solution.status == OPTIMAL
    plain = variants(problem)[0]
    exact = walk(plain, problem.budget, below=None, room=10**7, deadline=float("inf"))
    assert exact.exact
    assert exact.choice is not None
    optimum = float(plain.cost(exact.choice) * plain.tick)
    assert solution.bound <= optimum * (1 + 1e-9)
    assert solution.seconds <= optimum + 0.01 * 8.0
    loads = instants(problem, solution.choice, solution.groups)
    assert loads is not None
    assert max(loads.values()) == solution.peak <= problem.budget
    assert loads[solution.instant] == solution.peak


@pytest.mark.parametrize("count", [48, 200])
def test_many_identical_stages_are_proven_by_z3(count: int) -> None:
    problem = realistic_chain(count, 1, options=20)
    low, high = frontier_budgets(problem, 2)
    solution = solve_chain(
        replace(problem, budget=low + (high - low) // 3), reference_seconds=0.6 * count, timeout=LONG
    )
    assert solution.status == OPTIMAL
    assert solution.gap <= 0.01
    assert solution.solver.startswith("z3")
    assert "dynamic" not in solution.solver


@pytest.mark.parametrize("exact", [True, False])
def test_z3_has_little_time_for_what_is_proven_already(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It spent two thirds of every solve's seconds on a second proof of chains of a few stages."""
    problem = realistic_chain(12, 6, options=8, groupable=False)
    low, high = frontier_budgets(problem, 2)
    given: list[float] = []

    def gives_up(_: object, target: int, *, grain: int, deadline: float) -> CountVerdict:
        given.append(deadline - time.monotonic())
        return CountVerdict("unknown")

    monkeypatch.setattr(chain_module.Certifier, "cheaper", gives_up)
    if not exact:
        monkeypatch.setattr(chain_module, "walk", lambda *_, **__: Walk(None, False))
    solution = solve_chain(
        replace(problem, budget=low + (high - low) // 3), reference_seconds=8.0, timeout=LONG
    )
    assert solution.status == (OPTIMAL if exact else UNPROVEN)
    assert (max(given) < 0.2 * LONG) is exact


def test_groups_go_below_one_entering_value_per_stage() -> None:
    problem = realistic_chain(12, 1, options=8)
    grouped, plain = smallest_budget(problem), smallest_budget(replace(problem, groupable=()))
    assert grouped < plain
    solution = solve_chain(replace(problem, budget=grouped), reference_seconds=8.0, timeout=LONG)
    assert solution.groups
    loads = instants(problem, solution.choice, solution.groups)
    assert loads is not None
    assert max(loads.values()) == solution.peak == grouped


def test_out_of_time_says_so_with_the_true_gap() -> None:
    problem = realistic_chain(60, 60, options=12)
    low, high = frontier_budgets(problem, 2)
    budget = low + (high - low) // 4
    solution = solve_chain(replace(problem, budget=budget), reference_seconds=36.0, gap=0.0, timeout=1e-6)
    assert solution.status == UNPROVEN
    assert solution.peak <= budget
    assert solution.gap == (solution.seconds - solution.bound) / 36.0 > 0


def test_infeasible_names_the_instant_and_what_would_do() -> None:
    problem = realistic_chain(4, 1, options=8, groupable=False)
    least = smallest_budget(problem)
    with pytest.raises(
        InfeasibleError, match=r"No plan is within .* The smallest feasible budget is"
    ) as caught:
        solve_chain(replace(problem, budget=least - 1), reference_seconds=8.0)
    error = caught.value
    assert error.nearest == {"memory": float(least)}
    memory, instant = error.binding
    assert memory == "memory"
    assert instant.split()[0] in ("forward", "backward")
    assert instant[1:] in str(error)
    assert "of kept values" in str(error)
    solution = solve_chain(replace(problem, budget=least), reference_seconds=8.0, timeout=LONG)
    assert solution.peak == least
    assert solution.instant == instant


@settings(max_examples=10, deadline=None)
@given(problem=chains())
def test_a_frontier_falls(problem: ChainProblem) -> None:
    budgets = frontier_budgets(problem, 6)
    assume(len(budgets) > 1)
    found = chain_frontier(problem, reference_seconds=10.0, points=6)
    assert len(found) == len(budgets)
    assert all(s.peak <= b for s, b in zip(found, budgets, strict=True))
    assert all(a.seconds >= b.seconds for a, b in pairwise(found))
    assert all(s.bound <= s.seconds for s in found)
    assert found[-1].seconds == chain_optimum(replace(problem, budget=None))[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": ()}, "at least one stage"),
        ({"options": {}}, "has no options"),
        ({"groupable": ((0, 9),)}, "groupable"),
        ({"groupable": ((0, 2), (1, 3))}, "groupable"),
    ],
)
def test_a_chain_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solve_chain(replace(realistic_chain(4, 1, options=4), **change), reference_seconds=1.0)


def test_a_slack_for_no_stage_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="forward_slack"):
        solve_chain(
            replace(realistic_chain(2, 1, options=4), forward_slack={"h9": MB}), reference_seconds=1.0
        )


@pytest.mark.parametrize(
    "arguments",
    [{"gap": -1.0}, {"timeout": 0.0}, {"reference_seconds": 0.0}, {"reference_seconds": float("nan")}],
)
def test_bad_arguments_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="reference_seconds"):
        solve_chain(realistic_chain(2, 1, options=4), **{"reference_seconds": 1.0, **arguments})


@settings(max_examples=40, deadline=None)
@given(problem=chains(), above=st.integers(1, 4), tenths=st.integers(0, 10))
def test_ways_that_a_certificate_leaves_out_are_in_no_cheaper_choice(
    problem: ChainProblem, above: int, tenths: int
) -> None:
    """Every choice within the budget and below the target, of all there are, keeps its ways."""
    links = variants(problem)[0]
    choices = list(product(*(range(len(link.ways)) for link in links.links)))
    peaks, costs = sorted(map(links.peak, choices)), sorted({links.cost(c) for c in choices})
    budget, target = peaks[(len(peaks) - 1) * tenths // 10], costs[min(above, len(costs) - 1)]
    system = _System(links, budget, {(i, phase) for i in range(len(links.links)) for phase in (0, 1)})
    hopeless = any(surrogate.left < 0 for surrogate in system._reduce(target - links.ticks))
    left = {
        (i, w)
        for members, ways in zip(system.classes, system.ways, strict=True)
        for i in members
        for w, _ in ways
    }
    wanted = [c for c in choices if links.fits(c, budget) and links.cost(c) < target]
    assert not (hopeless and wanted)
    assert all((i, w) in left for choice in wanted for i, w in enumerate(choice))


def test_what_the_dynamic_program_was_exact_for_may_stay_its_proof_alone() -> None:
    problem = realistic_chain(6, 2, options=8)
    budgets = frontier_budgets(problem, 5)
    for budget in budgets:
        asked = replace(problem, budget=budget)
        both = solve_chain(asked, reference_seconds=8.0, timeout=LONG)
        alone = solve_chain(asked, reference_seconds=8.0, timeout=LONG, second=False)
        assert (alone.choice, alone.seconds, alone.status) == (both.choice, both.seconds, both.status)
        assert alone.bound <= alone.seconds and alone.gap <= 0.01
        assert alone.by_walk or alone.solver == both.solver
    assert any(solve_chain(replace(problem, budget=b), reference_seconds=8.0, second=False).by_walk
               for b in budgets[:-1])  # fmt: skip
