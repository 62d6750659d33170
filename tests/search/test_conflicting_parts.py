"""The best of a problem's parts, each without one side of a pair that excludes the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from effcompile.ir.figures import Certificate
from effcompile.search.search import GAP, _best

PROVEN = Certificate(
    status="optimal within gap", objective=1.0, bound=1.0, gap=0.0, sites=1, alternatives=2, seconds=0.0,
    solver="z3",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    name: str
    certificate: Certificate


def best(switched: float, plain: float) -> Any:
    parts = {"switched": switched, "plain": plain}
    return _best(
        [Part(n, replace(PROVEN, objective=s, bound=s - GAP * abs(s), gap=GAP)) for n, s in parts.items()]  # type: ignore[misc]
    )


@pytest.mark.parametrize(
    ("switched", "plain", "taken"),
    [
        (1.0, 1.5, "switched"),
        (1.5, 1.0, "plain"),
        (1.0, 1.0 + GAP / 2, "plain"),
        (1.0, 1.0, "plain"),
        (-1.0, -0.5, "switched"),
        (-1.0, -1.0, "plain"),
    ],
)
def test_a_switch_of_the_whole_model_is_made_where_it_is_better_by_more_than_the_gap(
    switched: float, plain: float, taken: str
) -> None:
    assert best(switched, plain).name == taken


def test_the_bound_is_that_of_all_parts() -> None:
    proven = best(1.0, 1.0 + GAP / 2).certificate
    assert proven.bound == pytest.approx(1 - GAP)
    assert proven.gap == pytest.approx(1 - proven.bound / proven.objective) and proven.gap > GAP
