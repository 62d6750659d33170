"""The loop that inference and training share: what running taught is a constraint of the next solve."""

from __future__ import annotations

import pytest

from effcompile.core.causes import Said
from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import Because, Unsupported
from effcompile.search.refine import Constraints, refine

#: Options by what they promise and what they turn out to take: seconds, bytes promised, bytes taken, error
#: promised, error made.
OPTIONS = {
    "tight": (1.0, 10, 14, 0.1, 0.1),
    "wrong": (2.0, 5, 5, 0.1, 0.9),
    "plain": (3.0, 6, 6, 0.1, 0.1),
}


def solve(constraints: Constraints) -> str:
    fits = {
        name: seconds
        for name, (seconds, promised, _, error, _) in OPTIONS.items()
        if ("form", name) not in constraints.forbidden
        and (constraints.budget is None or promised <= constraints.budget)
        and error * constraints.error_scale <= 0.5
    }
    if not fits:
        raise InfeasibleError(Said("nothing is left"))
    return min(fits, key=lambda name: fits[name])


def run(name: str, constraints: Constraints) -> tuple[list[str], Constraints | None]:
    _, _, taken, _, error = OPTIONS[name]
    seen.append(name)
    if constraints.budget is not None and taken > 12:
        return [*seen], constraints.with_less(taken - 12, Because(f"{name} took {taken}"))
    if error > 0.5:
        return [*seen], constraints.without(("form", name), Unsupported("its error is too large"))
    return [*seen], None


seen: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def test_what_holds_is_taken_at_once() -> None:
    assert refine(solve, run, rounds=5) == ["tight"]


def test_excess_and_a_refuted_choice_lead_to_what_holds() -> None:
    assert refine(solve, run, rounds=5, start=Constraints(budget=10)) == ["tight", "wrong", "plain"]


def test_the_last_round_is_returned_as_it_is() -> None:
    assert refine(solve, run, rounds=2, start=Constraints(budget=10)) == ["tight", "wrong"]


def test_what_the_solver_raises_leaves_the_loop() -> None:
    with pytest.raises(InfeasibleError, match="nothing is left"):
        refine(solve, run, rounds=5, start=Constraints(error_scale=10.0))


def test_constraints_add_up_and_rounds_are_counted() -> None:
    rounds: list[Constraints] = []

    def learning(_: str, constraints: Constraints) -> tuple[None, Constraints]:
        rounds.append(constraints)
        return None, constraints.with_errors_scaled(2.0, Because("off by 2")).with_new_prices(
            Because("stale")
        )

    refine(lambda _: "", learning, rounds=3)
    assert [c.round for c in rounds] == [1, 2, 3]
    assert [c.error_scale for c in rounds] == [1.0, 2.0, 4.0]
    assert [c.priced_again for c in rounds] == [0, 1, 2]
    assert rounds[-1].notes == (Because("off by 2"), Because("stale")) * 2
