"""The leanest schedule of a step: what its simulation finds above the planner's numbers is planned for; no
slower than it must be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from train_helpers import MODELS

from effcompile.capture import capture_training
from effcompile.core.causes import NotReached
from effcompile.core.errors import InfeasibleError
from effcompile.machine.machines import load_target
from effcompile.passes.training import checkpoint
from effcompile.passes.training.base import Case
from effcompile.planner.remat import smallest_budget, solve_chain
from effcompile.search.training import solve
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import Prepared, prepare


@cache
def prepared(name: str) -> Prepared:
    """A step, its blocks searched as long as a user's are."""
    model, batch = MODELS[name]()
    step = capture_training(model, (), batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SECONDS_PER_BLOCK", 0.5)
        costs = OperatorCosts(target=load_target("cpu-generic"), here=False)
        (found,) = prepare(step, [Case(step=step)], checkpoint.Checkpoint(), costs).variants
        assert found.blocks
    return found


def planners(found: Prepared) -> solve.Schedule:
    """What the planner takes for the leanest, of each block the option that keeps the least: the slowest of
    those.
    """
    free = replace(found.checkpoint.chain(found.cut, found.blocks, None), groupable=())
    problem = replace(free, budget=smallest_budget(free))
    choice = tuple(
        min(range(len(options)), key=lambda i: options[i].kept_bytes)
        for options in (free.options[s.kind] for s in free.stages)
    )
    chosen = tuple(free.options[stage.kind][i] for stage, i in zip(free.stages, choice, strict=True))
    emitted, trace = checkpoint.carried_out(found.cut, chosen, ())
    solution = solve_chain(problem, reference_seconds=found.seconds, gap=1.0)
    solution = replace(solution, choice=choice, seconds=sum(option.seconds for option in chosen))
    return solve.Schedule(
        prepared=found, problem=problem, solution=solution, chosen=chosen, emitted=emitted, trace=trace,
        rounds=1
    )  # fmt: skip


def test_it_needs_less_than_what_the_planner_takes_for_it_where_groups_need_more_than_it_knows() -> None:
    found = prepared("t5 of one layer")
    free = found.checkpoint.chain(found.cut, found.blocks, None)
    problem = replace(free, budget=smallest_budget(free))
    solution = solve_chain(problem, reference_seconds=found.seconds, gap=1.0)
    chosen = tuple(free.options[stage.kind][i] for stage, i in zip(free.stages, solution.choice, strict=True))
    peak = checkpoint.carried_out(found.cut, chosen, solution.groups)[1].peak_bytes
    assert peak > problem.budget  # type: ignore[operator]
    assert solve.leanest(found) < peak


def test_where_nothing_else_fits_it_is_the_fastest_of_those_that_are_as_lean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = prepared("gpt2")
    slow = planners(found)

    def none(*_: object) -> solve.Schedule:
        raise InfeasibleError(NotReached(rounds=1, over=1, node=""), nearest={"memory": 1.0})

    monkeypatch.setattr(solve, "_solved", none)
    monkeypatch.setattr(solve, "_lean", lambda _: slow)
    budget = max(slow.trace.peak_bytes, slow.problem.budget or 0)
    made = solve.schedule(found, budget)
    assert made.trace.peak_bytes <= budget
    assert made.seconds < slow.seconds


def test_what_one_option_was_above_is_held_against_no_other_of_its_block() -> None:
    """Otherwise schedules are slower than they must be: GPT-2's at its least budget by a sixth."""
    found = prepared("gpt2")
    made = solve.keeping_everything(found)
    made = replace(made, problem=found.checkpoint.chain(found.cut, found.blocks, None))
    whole = {
        kind: options.index(max(options, key=lambda o: o.kept_bytes))
        for kind, options in made.problem.options.items()
    }
    choice = tuple(whole[stage.kind] for stage in made.problem.stages)
    chosen = tuple(
        made.problem.options[stage.kind][i] for stage, i in zip(made.problem.stages, choice, strict=True)
    )
    made = replace(made, chosen=chosen, solution=replace(made.solution, choice=choice))
    budget = made.trace.peak_bytes - 1000
    corrected = solve._options_corrected(made, budget)
    changed = [
        (kind, i)
        for kind, options in made.problem.options.items()
        for i, option in enumerate(options)
        if corrected.options[kind][i] != option
    ]
    assert changed
    assert all(i == whole[kind] for kind, i in changed)
    assert not corrected.forward_slack and not corrected.backward_slack
    for kind, i in changed:
        before, after = made.problem.options[kind][i], corrected.options[kind][i]
        assert after.forward_peak >= before.forward_peak and after.backward_peak >= before.backward_peak
        assert (after.seconds, after.kept_bytes) == (before.seconds, before.kept_bytes)
    assert solve._corrected(made, budget).options == made.problem.options


def test_a_schedule_at_the_least_budget_is_within_it_after_corrections() -> None:
    found = prepared("gpt2")
    least = solve.leanest(found)
    for budget in (least, int(1.02 * least), int(1.1 * least)):
        assert solve.schedule(found, budget).trace.peak_bytes <= budget
