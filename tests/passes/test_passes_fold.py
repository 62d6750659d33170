"""Gains in the weights beside them: the same outputs to 1e-6, fewer operators, the model's own weights as
they were.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_helpers import by_work, context, plan_with, split
from torch import nn

from effcompile.capture.inference import capture
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.passes.fold import Fold, gains

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A branch with LayerScale behind its last linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    """An RMSNorm written out, whose gain two linears read."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24)
        self.gain = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        scaled = self.gain * normed
        return self.gate(scaled) * self.up(scaled)


class Batched(nn.Module):
    """BatchNorm behind linears with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 8, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(12), nn.BatchNorm1d(8)])
        for norm in self.norms:
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.uniform_(norm.bias, -1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))


class Shared(nn.Module):
    """A gain that something beside the linear reads, and a weight that two linears share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(16, 16), nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.gain
        return self.linear(scaled) + scaled + self.gain * self.linear(x)


def captured(make: Callable[[], nn.Module]) -> tuple[nn.Module, Program]:
    torch.manual_seed(1)
    model = make().eval()
    return model, capture(model, (X,), {})


@pytest.mark.parametrize(("make", "count"), [(Scaled, 1), (Normed, 1), (Batched, 2)])
def test_gains_go_into_weights_and_outputs_stay(make: Callable[[], nn.Module], count: int) -> None:
    model, program = captured(make)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gains(program)
    assert len(found) == count
    after = Fold().apply(program, plan_with({gain.site: "folded" for gain in found}))
    after.graph.lint()
    other = torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(after.module(other), model(other), rtol=1e-5, atol=1e-6)
    norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    assert not any(node.target is norm for node in after.graph.nodes) and not gains(after)
    assert len(list(after.graph.nodes)) < len(list(program.graph.nodes)) + (make is Batched)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_others_read_is_left() -> None:
    assert gains(captured(Shared)[1]) == []


def test_a_fold_is_priced_by_the_operator_that_goes() -> None:
    _, program = captured(Scaled)
    found, declined = split(Fold().propose(program, context(by_work, goal=Goal())))
    [choice] = found.values()
    assert not declined and choice.baseline == "separate"
    assert choice.option("folded").cost.seconds == 0 < choice.option("separate").cost.seconds
