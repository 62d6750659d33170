"""The search over whole choices against a look at every case, and the reasons of its record against what each
case says.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcompile.core.causes import Said
from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import OverBudget, Slower, Unsupported
from effcompile.planner.search import Record

BUDGET = 50


@dataclass(frozen=True)
class Plain:
    """A case whose solution takes `extra` seconds more than its bound, and `size` bytes."""

    options: dict[str, str]
    least_seconds: float
    extra: float
    size: int

    @property
    def seconds(self) -> float:
        return self.least_seconds + self.extra

    @property
    def bound(self) -> float:
        return self.least_seconds


CASES = st.lists(
    st.builds(
        Plain,
        options=st.fixed_dictionaries({"head": st.sampled_from("abc"), "states": st.sampled_from("xy")}),
        least_seconds=st.integers(0, 20).map(float),
        extra=st.sampled_from([0.0, 1.0, 5.0]),
        size=st.integers(1, 100),
    ),
    min_size=1,
    max_size=12,
)


def solve(case: Plain) -> Plain:
    if case.size > BUDGET:
        raise InfeasibleError(Said("too large"), nearest={"memory": float(case.size)})
    return case


def searched(cases: list[Plain]) -> Record[Plain, Plain]:
    record: Record[Plain, Plain] = Record(solve=solve)
    record.search(cases)
    return record


@given(CASES)
def test_the_fastest_case_within_the_budget_is_found(cases: list[Plain]) -> None:
    fitting = [case for case in cases if case.size <= BUDGET]
    record = searched(cases)
    if not fitting:
        with pytest.raises(InfeasibleError) as refused:
            _ = record.best
        assert refused.value.needed == min(case.size for case in cases)
        return
    assert record.best.seconds == min(case.seconds for case in fitting)
    assert record.bound <= record.best.seconds
    assert len(record.nodes) == len(cases)


@given(CASES)
def test_reasons_are_true(cases: list[Plain]) -> None:
    record = searched(cases)
    fitting = [case for case in cases if case.size <= BUDGET]
    best = min((case.seconds for case in fitting), default=0.0)
    for option, reason in record.declined("head"):
        mine = [case for case in cases if case.options["head"] == option]
        match reason:
            case Slower(seconds=seconds, at_least=True):
                assert fitting and all(best + seconds <= case.seconds for case in mine if case.size <= BUDGET)
            case Slower(seconds=seconds):
                assert best + seconds == min(case.seconds for case in mine if case.size <= BUDGET)
            case OverBudget(needed=needed):
                assert needed == min(case.size for case in mine) > BUDGET
            case Unsupported():
                raise AssertionError("every case can be had")


def test_what_cannot_be_is_said_beside_what_was_taken() -> None:
    record = searched(
        [
            Plain({"states": "kept", "batch": "1"}, 1.0, 0.0, 80),
            Plain({"states": "consumed", "batch": "1"}, 2.0, 0.0, 90),
        ]
    )
    record.refuse({"states": "consumed", "batch": "2"}, Unsupported("summed"))
    record.search([Plain({"states": "kept", "batch": "2"}, 3.0, 0.0, 20)])
    assert dict(record.declined("states")) == {"consumed": Unsupported("summed")}
    assert dict(record.declined("batch")) == {"1": OverBudget(needed=80)}
    assert record.exhausted == {"states": "kept", "batch": "2"}


def test_a_case_that_cannot_be_faster_is_not_solved() -> None:
    solved: list[float] = []

    def noted(case: Plain) -> Plain:
        solved.append(case.least_seconds)
        return solve(case)

    record: Record[Plain, Plain] = Record(solve=noted)
    record.search([Plain({"head": str(n)}, float(n), 0.5, 10) for n in (3, 1, 2)])
    assert solved == [1.0]
    assert dict(record.declined("head")) == {
        "2": Slower(seconds=0.5, at_least=True),
        "3": Slower(seconds=1.5, at_least=True),
    }
