"""What a user may declare, and the words for what may not be."""

import math

import numpy
import pytest
import torch
from torch import nn

import effcompile
from effcompile import Goal
from effcompile.core.errors import UsageError
from effcompile.core.units import parse_bytes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("6GiB", 6 << 30),
        ("900 MB", 900_000_000),
        (" 1.5g ", 3 << 29),
        ("1e3", 1000),
        (4096, 4096),
        (7.9, 7),
        (numpy.int64(5), 5),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_bytes(value) == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    ["", " ", "GiB", "-1", "1GiB!", "1_000", "١GiB", "nan", math.nan, True, [1], {}, torch.ones(1), b"1GiB"],
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(UsageError, match=r"(?s)^memory = .* is not a size\. Write it like 6GiB"):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 0.5, "0", "0.99", -math.inf])
def test_sizes_below_a_byte(value: object) -> None:
    with pytest.raises(UsageError, match="must be at least one byte"):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1e400", math.inf, 10**400, "99999999999999999999GiB", 1 << 63])
def test_sizes_that_no_machine_has(value: object) -> None:
    with pytest.raises(UsageError, match=r"memory must be less than 2\^63 bytes"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_a_size_too_long_to_print() -> None:
    with pytest.raises(UsageError, match="which no machine has"):
        parse_bytes(1 << 20_000)


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, 10**400, "0.01", True, [0.1]])
def test_errors_that_are_none(value: object) -> None:
    with pytest.raises(UsageError, match="must be a number ≥ 0"):
        Goal(max_error=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("goal", ["fast", 3, ["memory"], Goal])
def test_a_goal_that_is_none(goal: object) -> None:
    with pytest.raises(UsageError, match=r"is not a goal\. Give effcompile\.Goal\(\.\.\.\) or a dict"):
        effcompile.plan(nn.Linear(2, 2), (torch.ones(1, 2),), goal=goal)  # type: ignore[arg-type]


def test_a_goal_whose_fields_are_no_words() -> None:
    with pytest.raises(effcompile.EffcompileError, match="No goal field is named '1'"):
        effcompile.plan(nn.Linear(2, 2), (torch.ones(1, 2),), goal={1: 2})  # type: ignore[dict-item]
