"""Which errors were predicted too low, and by how much: two scales from one measured error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.core.cost import Cost
from effcompile.core.findings import Corrected
from effcompile.core.goal import Goal
from effcompile.ir.formats import BF16, FP32, INT8_STATIC, INT8_TOKEN, TWO_OF_FOUR, Form, WeightFormat
from effcompile.search.corrected import MARGIN, corrected
from effcompile.search.refine import Constraints

GOAL = Goal(max_error=1e-2)
SQUARES = st.floats(1e-7, 1e-4)


def plan(squares: dict[WeightFormat, float]) -> Any:
    decisions = [
        SimpleNamespace(form=Form(weights=held), cost=Cost(error_squared=square))
        for held, square in squares.items()
    ]
    return SimpleNamespace(predicted=SimpleNamespace(error=sum(squares.values()) ** 0.5), decisions=decisions)


def again(squares: dict[WeightFormat, float], learned: Constraints) -> float:
    """The squared error that the same plan is predicted at, after what was learned."""
    return sum(square * learned.scale_of(Form(weights=held)) for held, square in squares.items())


@settings(max_examples=200, deadline=None)
@given(rounding=SQUARES, codes=SQUARES, over=st.floats(1.0, 3.0), round_=st.integers(1, 3))
def test_the_refuted_plan_is_predicted_at_what_was_measured_or_above(
    rounding: float, codes: float, over: float, round_: int
) -> None:
    squares = {BF16: rounding, INT8_STATIC: codes}
    predicted = (rounding + codes) ** 0.5
    measured = max(predicted, GOAL.tolerance) * over
    learned = corrected(Constraints(round=round_), plan(squares), measured, GOAL)
    assert again(squares, learned) >= measured**2 * MARGIN * (1 - 1e-9)
    assert learned.rounding_scale <= learned.error_scale * (1 + 1e-9)


def test_codes_that_are_off_leave_16_bits_as_they_were() -> None:
    """ViT by OpenVINO: with the scale of all it would have no plan in bf16 left."""
    squares = {BF16: 0.92e-4, INT8_STATIC: 0.06e-4}
    learned = corrected(Constraints(), plan(squares), 1.02e-2, GOAL)
    assert learned.rounding_scale == 1 and learned.error_scale > 2
    assert again({BF16: 0.96e-4}, learned) < GOAL.tolerance**2
    assert "(of 16 bits by 1.00)" in str(learned.notes[-1])


@pytest.mark.parametrize("squares", [{BF16: 1e-4}, {INT8_TOKEN: 1e-4}, {BF16: 1e-4, INT8_TOKEN: 1e-7}])
def test_where_one_kind_is_all_or_codes_cannot_be_so_far_off_all_is_scaled_alike(
    squares: dict[WeightFormat, float],
) -> None:
    learned = corrected(Constraints(), plan(squares), 2e-2, GOAL)
    assert learned.rounding_scale == learned.error_scale > 3.9
    assert "of 16 bits" not in str(learned.notes[-1])


def test_what_emulation_shows_of_16_bits_is_taken_for_them() -> None:
    squares = {BF16: 0.5e-4, INT8_TOKEN: 0.5e-4}
    learned = corrected(
        Constraints(), plan(squares), 1.4e-2, GOAL, emulated=True, rounding=lambda: (0.8e-4) ** 0.5
    )
    assert learned.rounding_scale == pytest.approx(1.6 * MARGIN)
    assert again(squares, learned) == pytest.approx(1.96e-4 * MARGIN)


@pytest.mark.parametrize(
    ("form", "rounds"),
    [
        (Form(weights=BF16), True), (Form(word="merged", weights=BF16), True), (Form(word="sdpa_bf16"), True),
        (Form(weights=FP32), False), (Form(weights=INT8_TOKEN), False), (Form(word="sdpa_int8"), False),
        (Form(weights=TWO_OF_FOUR), False), (Form(weights=BF16, pruned=0.25), False),
        (Form(word="tanh"), False),
    ],
)  # fmt: skip
def test_what_rounds_has_no_scale_and_leaves_nothing_out(form: Form, rounds: bool) -> None:
    assert form.rounds is rounds


def test_the_factor_of_16_bits_is_told_only_where_it_is_another_one() -> None:
    told = {"round": 2, "measured": 1.6e-2, "predicted": 1.0e-2, "factor": 1.7}
    assert "scaled by 1.70 and solved" in str(Corrected(**told, rounding=1.7))
    assert "scaled by 1.70 (of 16 bits by 1.02) and solved" in str(Corrected(**told, rounding=1.02))
