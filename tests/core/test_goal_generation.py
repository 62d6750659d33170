"""What a goal says of generation."""

import pytest

from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"context": 100}, (100, 50, 50)),
        ({"context": 100, "prompt": 30}, (100, 30, 70)),
        ({"context": 100, "new": 30}, (100, 70, 30)),
        ({"prompt": 5, "new": 7}, (12, 5, 7)),
        ({"context": 1}, (1, 1, 1)),
    ],
)
def test_counts_that_are_not_given(given: dict[str, int], tokens: tuple[int, int, int]) -> None:
    assert Goal.of(mode="generation", **given).tokens == tokens


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "generation"}, "needs context"),
        ({"mode": "generation", "context": 0}, "context = 0"),
        ({"mode": "generation", "context": 2.5}, "whole number"),
        ({"mode": "generation", "context": True}, "whole number"),
        ({"mode": "generation", "context": 10, "prompt": 8, "new": 3}, "longer context"),
        ({"mode": "generation", "context": 10, "batch": 0}, "batch = 0"),
        ({"mode": "generation", "context": 10, "reads": "last"}, "mode = 'inference'"),
        ({"context": 10}, "context is for mode = 'generation'"),
        ({"batch": 2}, "batch is for mode = 'generation'"),
    ],
)
def test_counts_that_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Goal.of(**given)


def test_a_generation_in_one_line() -> None:
    goal = Goal.of(mode="generation", context=64, batch=2, memory="1MiB")
    assert (
        goal.describe()
        == "least time, exact, peak memory ≤ 1.0 MiB, prompt 32 + 32 new tokens, context 64, batch 2"
    )
