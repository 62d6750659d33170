"""How long the original and its plans are timed in turn: until their figures have settled."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.compiler import measure
from effcompile.core import timing
from effcompile.proof.training import timed


@pytest.mark.parametrize(("later", "rounds"), [(1.0, 3), (0.5, 6)])
def test_rounds_are_added_until_no_figure_moves(
    later: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half as fast at first has not settled after three rounds, and has after six."""
    asked: list[int] = []

    def in_turn(runs: Mapping[str, Any], more: int, repeats: int = 2) -> dict[str, list[float]]:
        slow = 3 if sum(asked) == 0 else 0
        asked.append(more if repeats == 2 else 0)
        return {name: ([0.01] * slow + [0.01 * later] * 99)[: more * repeats] for name in runs}

    monkeypatch.setattr(measure, "interleaved", in_turn)
    monkeypatch.setattr(measure, "_MOST", 40)
    x = torch.ones(2, 2)
    program = SimpleNamespace(flat_inputs=lambda: [x], args=(x,), kwargs={})
    plan = SimpleNamespace(plan=SimpleNamespace(backend="b"), lowered=lambda *tensors: None)
    found = measure.compare(program, nn.Linear(2, 2), [plan])  # type: ignore[arg-type, list-item]
    assert sum(asked) == rounds
    assert found == {"original": 0.01 * later, "b": 0.01 * later}


@pytest.mark.parametrize(
    ("samples", "enough"),
    [([1.0], False), ([1.0, 1.01], True), ([1.0, 1.2], False), ([1.2, 1.0, 1.01], True), ([9.0, 9.3], True)],
)
def test_a_step_is_run_until_its_fastest_has_come_twice(samples: list[float], enough: bool) -> None:
    assert timed._repeated(samples) is enough
    assert timing.SETTLED < timed._SETTLED_IF_LONG
