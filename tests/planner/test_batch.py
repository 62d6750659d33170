"""The search for a batch against trying every size, on steps whose times and bytes follow the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcompile.core.errors import UsageError
from effcompile.planner.batch import WORTH, BatchSearch, BatchTrial, sizes, wanted_sizes


@dataclass(frozen=True)
class Machine:
    """Operators (bytes that are read once, seconds an example, seconds a byte) and what each
    example holds.
    """

    operators: tuple[tuple[float, float], ...]
    fixed_bytes: int
    kept: int
    remade: int
    again: float
    memory: int

    def unlimited(self, b: int) -> float:
        return 1e-6 + sum(max(once, each * b) for once, each in self.operators)

    def seconds(self, b: int) -> float | None:
        """Each example either keeps its values, or remakes them, which takes longer."""
        room = self.memory - self.fixed_bytes
        kept = (
            min(b, (room - b * self.remade) // (self.kept - self.remade)) if room >= b * self.remade else -1
        )
        return None if kept < 0 else self.unlimited(b) + (b - kept) * self.again

    def attempt(self, b: int) -> BatchTrial[None]:
        return BatchTrial(
            batch=b,
            unlimited=self.unlimited(b),
            bytes=self.fixed_bytes + b * self.kept,
            seconds=self.seconds(b),
        )


positive = st.floats(1e-6, 1e-2)
machines = st.builds(
    Machine, operators=st.lists(st.tuples(positive, positive), min_size=1, max_size=5).map(tuple),
    fixed_bytes=st.integers(0, 1000), kept=st.integers(50, 400), remade=st.integers(1, 49), again=positive,
    memory=st.integers(100, 200_000),
)  # fmt: skip


@given(machine=machines, start=st.integers(1, 300), least=st.integers(1, 8), most=st.integers(16, 500))
def test_the_batch_is_that_of_trying_every_size(machine: Machine, start: int, least: int, most: int) -> None:
    wanted = sizes(least, most)
    found = BatchSearch(sizes=wanted, memory=machine.memory, attempt=machine.attempt).best(start)
    rates = {b: b / seconds for b in wanted if (seconds := machine.seconds(b)) is not None}
    if not rates:
        assert found is None
        return
    assert found is not None and found.rate == pytest.approx(rates[found.batch])
    assert found.rate * (1 + WORTH) >= max(rates.values()) * (1 - 1e-9)


def test_few_sizes_are_tried() -> None:
    machine = Machine(
        operators=((1e-3, 1e-5),), fixed_bytes=0, kept=1 << 20, remade=1 << 16, again=3e-6, memory=1 << 30
    )
    search = BatchSearch(sizes=sizes(), memory=machine.memory, attempt=machine.attempt)
    best = search.best(2)
    assert best is not None and len(search.tried) <= 8 < len(search.sizes)


def test_an_ever_larger_batch_is_not_looked_for_where_it_gains_nothing() -> None:
    machine = Machine(operators=((1e-4, 1e-3),), fixed_bytes=0, kept=10, remade=5, again=1.0, memory=1 << 40)
    search = BatchSearch(sizes=sizes(), memory=machine.memory, attempt=machine.attempt)
    search.best(8)
    assert max(search.tried) < 64


def test_sizes_are_powers_of_two_and_the_halves_between_them() -> None:
    assert sizes()[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert sizes(7, 90) == [7, 8, 12, 16, 24, 32, 48, 64, 90]
    assert sizes(5, 12) == list(range(5, 13))


@pytest.mark.parametrize(
    ("asked", "found"),
    [(8, [8]), ("8", [8]), ("30..33", [30, 31, 32, 33]), ([16, 4, 16], [4, 16]), ("auto", sizes())],
)
def test_what_a_user_may_ask_for(asked: object, found: list[int]) -> None:
    assert wanted_sizes(asked) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [0, -3, "8..4", "many", "1..", "0..4", [], [2.5], [True], True, 1 << 20, "1..1e9", math.inf, {"a": 1}],
)
def test_what_no_batch_is(asked: object) -> None:
    with pytest.raises(UsageError, match=r"is no batch\. Give 'auto', a range"):
        wanted_sizes(asked)  # type: ignore[arg-type]
