"""What a loop writes part by part becomes one stack, to the bit; where something of what was there before is
left, or is read between, the writes stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture.inference import capture

aten = torch.ops.aten


def _loop(x: Tensor) -> Tensor:
    out, state = torch.zeros_like(x), x[:, 0] * 0
    for at in range(x.shape[1]):
        state = state * 0.5 + x[:, at]
        out[:, at] = state.tanh()
    return out


def _backwards_and_twice(x: Tensor) -> Tensor:
    """The first write of place 2 is lost."""
    out = torch.empty_like(x)
    out[:, 2] = x[:, 0]
    for at in range(-1, -1 - x.shape[1], -1):
        out[:, at] = x[:, at].exp()
    return out


def _last_axis(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for at in range(x.shape[2]):
        out[..., at] = x[..., at].square()
    return out


def _all_but_one(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    for at in range(1, x.shape[1]):
        out[:, at] = x[:, at]
    return out


def _read_between(x: Tensor) -> Tensor:
    out, sums = torch.zeros_like(x), x[:, 0] * 0
    for at in range(x.shape[1]):
        out[:, at] = x[:, at]
        sums = sums + out.sum(1)
    return torch.cat([out, sums[:, None]], 1)


def _wider(x: Tensor) -> Tensor:
    """One row is written to each of a batch."""
    out = torch.zeros_like(x)
    for at in range(x.shape[1]):
        out[:, at] = x[0, at]
    return out


def _narrower_dtype(x: Tensor) -> Tensor:
    """The write rounds."""
    out = torch.zeros_like(x, dtype=torch.bfloat16)
    for at in range(x.shape[1]):
        out[:, at] = x[:, at]
    return out


def _columns(x: Tensor) -> Tensor:
    """The result lies as x does, its second axis inmost."""
    y = x.transpose(1, 2)
    out = torch.zeros_like(y)
    for at in range(y.shape[1]):
        out[:, at] = y[:, at]
    return out


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "writes", "stacks"),
    [
        (_loop, 0, 1),
        (_backwards_and_twice, 0, 1),
        (_last_axis, 0, 1),
        (_all_but_one, 4, 0),
        (_read_between, 5, 0),
        (_wider, 0, 1),
        (_narrower_dtype, 5, 0),
        (_columns, 4, 0),
    ],
)
def test_writes_of_all_parts_are_one_stack(
    function: Callable[[Tensor], Tensor], writes: int, stacks: int
) -> None:
    model, x = Function(function), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    program = capture(model, (x,), {}, dynamic=False)
    found = Counter(node.target for node in program.graph.nodes)
    assert (found[aten.select_scatter.default], found[aten.stack.default]) == (writes, stacks)
    ours, theirs = program.module(x), model(x)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride() and ours.dtype is theirs.dtype
