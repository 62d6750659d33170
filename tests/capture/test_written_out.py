"""Activations that a model writes out are captured as the operators that they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture import capture

aten = torch.ops.aten


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def halved_last(x: Tensor) -> Tensor:
    return (x + x * torch.erf(x / math.sqrt(2.0))) * 0.5


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 16), nn.Linear(16, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize(
    ("function", "target", "others"),
    [
        (new_gelu, aten.gelu.default, {"approximate": "tanh"}),
        (fast_gelu, aten.gelu.default, {"approximate": "tanh"}),
        (erf_gelu, aten.gelu.default, {}),
        (halved_last, aten.gelu.default, {}),
        (swish, aten.silu.default, {}),
    ],
)
def test_one_operator_stands_for_them(
    function: Callable[[Tensor], Tensor], target: Callable[..., object], others: dict[str, object]
) -> None:
    model, x = Model(function).eval(), torch.randn(3, 8) * 3
    program = capture(model, (x,))
    (node,) = program.calls(target)
    assert dict(node.kwargs) == others
    assert not {aten.tanh.default, aten.erf.default, aten.sigmoid.default} & {
        n.target for n in program.graph.nodes
    }
    torch.testing.assert_close(program.module(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sigmoid(1.702 * x),  # OpenAI's
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
        lambda x: x * torch.tanh(x),
        lambda x: torch.sigmoid(x) * x.roll(1, -1),
        lambda x: torch.sigmoid(x[..., :8]).repeat(1, 2) * x,
    ],
)
def test_what_is_another_function_stays(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Model(function).eval(), torch.randn(3, 8)
    program = capture(model, (x,))
    assert not list(program.calls(aten.gelu.default, aten.silu.default))
    torch.testing.assert_close(program.module(x), model(x))


def test_a_part_that_is_read_elsewhere_stays() -> None:
    model, x = Model(lambda x: new_gelu(x) + torch.tanh(x)).eval(), torch.randn(3, 8)
    program = capture(model, (x,))
    assert len(list(program.calls(aten.gelu.default))) == len(list(program.calls(aten.tanh.default))) == 1
    torch.testing.assert_close(program.module(x), model(x))
