from __future__ import annotations

import math
from dataclasses import replace

import pytest
from brute import feasible_choices, problems
from hypothesis import HealthCheck, assume, given, settings

from effcompile.core.causes import Limits
from effcompile.core.errors import InfeasibleError
from effcompile.planner import Alternative, Problem, solve

FEW = settings(
    max_examples=60,
    deadline=None,
    # most problems can be met, and what hypothesis draws changes with the constants in all code it is beside
    suppress_health_check=[HealthCheck.filter_too_much],
)

#: Each of the two limits can be met, not both: small is inaccurate.
SMALL = Alternative(name="w4", objective=1.0, resources={"memory": 1.0, "error_squared": 4.0})
EXACT = Alternative(name="fp32", objective=2.0, resources={"memory": 4.0, "error_squared": 0.0})
JOINT = Problem(
    sites={"a": (EXACT, SMALL), "b": (EXACT, SMALL)},
    limits={"memory": 3.0, "error_squared": 1.0, "spare": 9.0},
)


@FEW
@given(problem=problems())
def test_the_explanation_is_right(problem: Problem) -> None:
    assume(not feasible_choices(problem))
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    core = {r: problem.limits[r] for r in caught.value.binding}
    assert not feasible_choices(replace(problem, limits=core))
    for resource in core:  # irreducible
        assert feasible_choices(replace(problem, limits={r: v for r, v in core.items() if r != resource}))
    for resource in problem.limits:
        others = {r: v for r, v in problem.limits.items() if r != resource}
        mends = bool(feasible_choices(replace(problem, limits=others)))
        assert (resource in caught.value.nearest) == mends
        if mends:
            least = caught.value.nearest[resource]
            assert feasible_choices(replace(problem, limits={**others, resource: least}))
            assert not feasible_choices(
                replace(problem, limits={**others, resource: math.nextafter(least, -math.inf)})
            )


def test_limits_that_clash_are_said_to_clash() -> None:
    with pytest.raises(InfeasibleError) as caught:
        solve(JOINT)
    assert set(caught.value.binding) == {"memory", "error_squared"}
    assert caught.value.nearest == {"memory": 8.0, "error_squared": 8.0}
    assert caught.value.why == (Limits(limits=(("memory", 3.0), ("error_squared", 1.0)), beside=1),)
    assert str(caught.value) == (
        "No plan is within peak memory 3 B and error_squared 1: each can be met, but not together. "
        "The smallest feasible value is peak memory 8 B or error_squared 8, the other limits unchanged."
    )


def test_one_impossible_limit_is_named_alone() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"^No plan is within peak memory 1 B\. The smallest feasible value is peak memory 2 B, the "
        r"other",
    ) as caught:
        solve(replace(JOINT, limits={"memory": 1.0, "error_squared": 100.0}))
    assert caught.value.binding == ("memory",)


def test_requirements_that_contradict_each_other_are_named() -> None:
    x = (Alternative(name="x", objective=0.0, requires={"b": ("y",)}),)
    y = (Alternative(name="y", objective=0.0, requires={"c": ("z",)}),)
    z = (Alternative(name="z", objective=0.0), Alternative(name="w", objective=0.0, requires={"b": ("v",)}))
    v = (*y, Alternative(name="v", objective=0.0))
    never = (Alternative(name="w", objective=0.0, requires={"a": ("x",), "b": ("v",)}),)
    problem = Problem(sites={"a": x, "b": v, "c": z, "d": never}, limits={"memory": 1.0})
    with pytest.raises(InfeasibleError, match=r"whatever the limits.*d = w") as caught:
        solve(problem)
    assert caught.value.binding == ()
