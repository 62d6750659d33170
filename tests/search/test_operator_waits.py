"""What may be waited for the machine's pace is divided among a step's operators by what they are worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from effcompile.core.pace import Pace
from effcompile.estimate import operators
from effcompile.machine.machines import load_target
from effcompile.search.training.operator_costs import OperatorCosts


class Patient(Pace):
    """Notes what each operator in turn may lose."""

    def __init__(self, patience: float) -> None:
        super().__init__(lambda: None, patience=patience)
        self.allowed: list[float] = []

    @contextmanager
    def losing(self, seconds: float) -> Iterator[None]:
        self.allowed.append(seconds)
        with super().losing(seconds):
            yield


def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    bias = bias.neg()
    for _ in range(3):
        x = x @ w
    return nn.functional.relu(x[0, :4] + bias)


def test_patience_is_for_what_a_step_spends_its_seconds_on(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.zeros(256, 256)
    graph = make_fx(step, tracing_mode="fake")(wide, wide, torch.zeros(4)).graph
    pace = Patient(patience=8.0)
    costs = OperatorCosts(target=load_target("cpu-generic"), here=True, pace=pace)
    said: list[Any] = []
    measured = operators._measure
    monkeypatch.setattr(operators, "_measure", lambda node, *rest: said.append(node) or measured(node, *rest))
    costs.measure(graph.nodes)
    allowed = dict(zip([str(node.target) for node in said], pace.allowed, strict=True))
    assert sum(pace.allowed) == pytest.approx(8.0)
    assert allowed["aten.mm.default"] > 0.5 * 8.0, "three of them"
    assert allowed["aten.neg.default"] < 0.15 * 8.0
    costs.measure(graph.nodes)
    assert len(pace.allowed) == len(said), "what is known is not waited for"
