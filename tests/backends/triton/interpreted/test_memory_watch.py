"""What watches the launches of these tests sees each fault that it is for, and none where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from memory_watch import OutOfBoundsError, RaceError


@triton.jit
def _copy(x, y, size, SHIFT: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """y[i + SHIFT] = x[i], of BLOCK elements a program; READ: y is x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, 8)
    value = tl.load((y if READ else x) + at, mask=at < size, other=0.0)
    tl.store(y + at + SHIFT, value, mask=at < size)


@triton.jit
def _add(y):
    tl.atomic_add(y + tl.arange(0, 8), 1.0)


def run(shift: int, size: int = 32, read: bool = False, block: int = 8) -> torch.Tensor:
    y = torch.zeros(32)
    _copy[(4,)](torch.ones(32), y, size, shift, read, block)
    return y


def test_programs_apart_are_no_fault() -> None:
    assert run(0).sum() == 32
    y = torch.zeros(8)
    _add[(3,)](y)
    assert (y == 3).all()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"shift": 1}, OutOfBoundsError),
        ({"shift": -1}, OutOfBoundsError),
        ({"shift": 0, "size": 40, "block": 9}, OutOfBoundsError),
        ({"shift": 0, "block": 7, "size": 29}, RaceError),
        ({"shift": 1, "size": 31, "read": True}, RaceError),
    ],
)
def test_a_fault_is_seen(given: dict[str, Any], error: type[AssertionError]) -> None:
    with (
        pytest.raises(Exception, match=error.__name__) if error is OutOfBoundsError else pytest.raises(error)
    ):
        run(**given)
