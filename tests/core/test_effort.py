"""`effort` bounds the seconds of solving, of one solve and of a whole call; what is found then is feasible,
and its gap is told.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core import effort
from effcompile.planner import Alternative, Problem, solve


def test_a_solve_takes_its_share_and_no_more_than_the_call_has_left() -> None:
    assert effort.allowed(4.0) == 4.0  # nobody asked
    with effort.within("low"):
        assert effort.allowed(4.0) == 1.0
        effort.spend(14.5)
        assert effort.allowed(20.0) == 0.5
        effort.spend(100.0)
        assert effort.allowed(20.0) == 0.5 and effort.allowed(0.4) == 0.1  # some choice is always found
    with effort.within("high"):
        assert effort.allowed(4.0) == 32.0
    assert effort.allowed(4.0) == 4.0


def test_solving_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []
    monkeypatch.setattr(effort, "spend", spent.append)
    alternatives = tuple(
        Alternative(name=f"o{i}", objective=float(i), resources={"memory": 9.0 - i}) for i in range(3)
    )
    found = solve(Problem(sites={"a": alternatives, "b": alternatives}, limits={"memory": 16.0}))
    assert spent == [found.seconds] and found.seconds > 0


def test_another_effort_is_refused_before_anything_is_done() -> None:
    with pytest.raises(effcompile.UsageError, match=r"effort = 'most' is not known.*'low', 'normal', 'high'"):
        effcompile.plan(nn.Linear(4, 4), torch.zeros(1, 4), effort="most")  # type: ignore[arg-type]
