"""Inputs like the example: how many are run, below which error others lie, and what is made of both."""

import math
import random
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import effcompile
from effcompile.capture import capture
from effcompile.core.findings import AlikeErrors
from effcompile.core.goal import Goal
from effcompile.ir.figures import Check
from effcompile.proof.alike import foreseen, holds_for_others, inputs_alike, likely, near, together
from effcompile.proof.verify import references, verify
from effcompile.report.reasons import words


@given(st.lists(st.floats(0, 1e3, allow_nan=False), max_size=20), st.floats(1e-3, 1e3))
def test_what_is_likely_is_no_smaller_than_what_was_seen_and_scales_with_it(
    errors: list[float], factor: float
) -> None:
    found = likely(errors)
    assert found >= max(errors, default=0.0)
    if not errors or min(errors) > 1e-6:
        assert likely([error * factor for error in errors]) == pytest.approx(found * factor)
    assert likely(sorted(errors)) == pytest.approx(found)


def test_of_errors_without_spread_or_too_few_it_is_the_largest() -> None:
    assert likely([0.01] * 8) == pytest.approx(0.01)
    assert likely([0.01, 0.02, 0.03]) == 0.03
    assert likely([*[0.0] * 7, 0.03]) == 0.03
    assert likely([1e-200, *[0.01] * 9]) == likely([0.0, *[0.01] * 9]) < 0.02
    assert likely([*[0.01] * 8, math.inf]) == math.inf


@pytest.mark.parametrize("count", [8, 12, 16])
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_of_a_sample_the_bound_is_above_most_of_the_inputs_as_often_as_it_says(
    count: int, spread: float
) -> None:
    """95 of 100 inputs are below, in 95 of 100 samples: of errors whose distribution is known."""
    draw, logs = random.Random(0), NormalDist(math.log(0.01), spread)
    most = math.exp(logs.inv_cdf(0.95))
    samples = [[math.exp(draw.gauss(logs.mean, logs.stdev)) for _ in range(count)] for _ in range(2000)]
    covered = sum(likely(sample) >= most for sample in samples) / len(samples)
    assert covered > 0.93
    assert covered < 0.99  # and it is no more than it needs to be


def test_the_time_that_a_model_takes_decides_how_many_are_run() -> None:
    program = capture(nn.Linear(8, 8).eval(), (torch.randn(4, 8),), {})
    counts = [len(inputs_alike(program, seconds)) for seconds in (1e-4, 0.2, 0.25, 0.26, 5.0)]
    assert counts == [16, 10, 8, 0, 0]
    drawn = [args[0] for args, _ in inputs_alike(program, 1e-4)]
    assert len({tensor.sum().item() for tensor in drawn}) == 16
    theirs = [((torch.randn(4, 8),), {}) for _ in range(7)]
    known = replace(program, calibration=tuple(theirs))
    assert [args for args, _ in inputs_alike(known, 1e-4)] == [args for args, _ in theirs[1:]]


def test_no_padding_is_drawn_within_a_text() -> None:
    """Its row is zeros, of which a norm makes what rounding left: no text has it where it is seen."""
    table = nn.Sequential(nn.Embedding(8, 4, padding_idx=3), nn.Linear(4, 4)).eval()
    ids = torch.tensor([[1, 2, 4, 7, 5, 6, 0, 3]])
    drawn = torch.cat([args[0] for args, _ in inputs_alike(capture(table, (ids,), {}), 1e-4)])
    assert not (drawn[:, :-1] == 3).any() and len(drawn.unique()) == 8


def test_inputs_of_which_nothing_can_be_drawn_are_not_run_again() -> None:
    class Flags(nn.Module):
        def forward(self, flags: Tensor) -> Tensor:
            return flags.float() * 2

    program = capture(Flags(), (torch.tensor([[True, False]]),), {})
    assert inputs_alike(program, 1e-4) == []


def test_they_are_judged_together_and_only_near_the_limit() -> None:
    torch.manual_seed(0)
    model, goal = nn.Linear(8, 8).eval(), Goal(max_error=0.02)
    program = capture(model, (torch.randn(4, 8),), {})
    cases = references(program, model, goal, (), inputs_alike(program, 1e-4))
    calls = list[int]()

    def off_by(share: float, more: float):  # type: ignore[no-untyped-def]
        def run(x: Tensor) -> Tensor:
            calls.append(1)
            return model(x) * (1 + share + more * (len(calls) % 3))

        return run

    far = verify(off_by(0.005, 0.001), program, cases, goal)
    plain = len(calls)
    assert not any(isinstance(check.note, AlikeErrors) for check in far) and holds_for_others(far)
    close = verify(off_by(0.015, 0.002), program, cases, goal)
    assert len(calls) == 2 * plain + 16
    told = close[-1]
    assert told.name == "16 inputs like the example" and told.passed
    assert isinstance(told.note, AlikeErrors) and told.error == pytest.approx(0.019, rel=1e-3)
    assert told.error < told.note.below == foreseen(close) and not holds_for_others(close)
    assert "largest of 16; by their spread 95% of such inputs are below 2." in words(told.note)
    assert [near({"example": error}, goal, program) for error in (0.001, 0.019, 0.03)] == [False, True, False]
    other = {"example": 0.001, "second shape": 0.019}
    assert not near(other, goal, program), "its errors have a spread of their own"
    assert near({"example": 0.001, "calibration input": 0.019}, goal, program)
    assert not near({"example": 0.019, "second shape": 0.03}, goal, program)


def test_a_model_that_chooses_by_numbers_is_run_on_them_far_from_the_limit_too() -> None:
    """A small error is another choice on few inputs, which are off by far."""

    class Chooses(nn.Module):
        def __init__(self, by_number: bool) -> None:
            super().__init__()
            self.linear, self.by_number = nn.Linear(8, 8), by_number

        def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.where(y > 0.1 if self.by_number else kinds > 1, y, -y)

    inputs = (torch.randn(4, 8), torch.arange(8))
    for by_number in (True, False):
        program = capture(Chooses(by_number).eval(), inputs, {})
        assert near({"example": 0.001}, Goal(max_error=0.1), program) is by_number
        assert not near({"example": 0.0}, Goal(max_error=0.1), program)


def test_one_that_fails_says_why() -> None:
    bad = Check(name="like the example 2", error=math.inf, limit=0.1)
    good = [Check(name="like the example 1", error=0.05, limit=0.1)] * 8
    found = together([*good, bad], Goal(max_error=0.1))
    assert not found.passed and found.error == math.inf and found.note is None


class Varying(nn.Module):
    """Linears whose inputs have a large number in a place that is drawn: the error varies from input to
    input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).pow(3)
        return x


@pytest.mark.parametrize("limit", [0.01, 0.004])
def test_a_plan_leaves_room_for_inputs_that_nobody_ran(limit: float) -> None:
    torch.manual_seed(0)
    model, x = Varying().eval(), torch.randn(3, 64)
    fast = effcompile.optimize(model, inputs=x, max_error=limit, backend="torch-eager")
    with torch.no_grad():
        pairs = [(fast(y), model(y)) for y in torch.randn(40, 3, 64)]
    errors = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    assert sum(error > limit for error in errors) <= 4
    assert all(check.passed for check in fast.plan.checks)
