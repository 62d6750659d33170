"""Which lookups may meet a negative index: what is said to be none is tried with random inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture import capture
from effcompile.sites.lookups import lookups, may_be_negative, reads_inputs

ROWS = 64
EXAMPLE = torch.tensor([[5, 4, 3, 7, 6, 8, 3, 5]])


class Of(nn.Module):
    """A table looked up at a function of integers."""

    def __init__(self, index: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.index = nn.Embedding(ROWS, 4), index
        self.register_buffer("steps", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.index(x) + 0 * self.steps[0])


NEVER: dict[str, Callable[[Tensor], Tensor]] = {
    "absolute": lambda x: x.abs(),
    "clamped": lambda x: x.clamp(0, 9),
    "clamped below": lambda x: x.clamp_min(0),
    "remainder": lambda x: x % 7,
    "positions of tokens": lambda x: x.ne(1).long().cumsum(1) * x.ne(1).long() + 1,
    "largest": lambda x: x.float().argmax(-1),
    "the best two": lambda x: x.float().topk(2, -1).indices,
    "where both are": lambda x: torch.where(x > 2, x.abs(), x % 3),
    "of a table": lambda x: torch.arange(10)[x % 10],
    "bool": lambda x: (x > 3).long() * 5,
    "counted": lambda x: torch.arange(x.shape[1]) + (x > 0).long(),
}
PERHAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "the input": lambda x: x,
    "less": lambda x: x.abs() - 1,
    "negated": lambda x: 9 - x.abs(),
    "where one is": lambda x: torch.where(x > 2, x, x % 3),
    "half clamped": lambda x: x.clamp(max=9),
    "of a float": lambda x: (x.abs().float().log()).long(),
    "remainder of a negative": lambda x: x % -9 + 9,
    "subtracted": lambda x: torch.add(2 * x.abs(), x.abs(), alpha=-2),
}


@pytest.mark.parametrize("index", NEVER.values(), ids=list(NEVER))
def test_what_is_never_negative(index: Callable[[Tensor], Tensor]) -> None:
    program = capture(Of(index).eval(), (torch.full((2, 8), 5),), dynamic=False)
    assert len(list(lookups(program))) >= 1
    assert may_be_negative(program) == []
    for seed in range(20):
        x = torch.randint(-9, 9, (2, 8), generator=torch.Generator().manual_seed(seed))
        assert int(index(x).min()) >= 0


@pytest.mark.parametrize("index", PERHAPS.values(), ids=list(PERHAPS))
def test_what_may_be_negative(index: Callable[[Tensor], Tensor]) -> None:
    program = capture(Of(index).eval(), (EXAMPLE,), dynamic=False)
    (found,) = may_be_negative(program)
    assert found.size == ROWS and found.constant and reads_inputs(found.index)


def test_positions_are_of_the_sizes_alone() -> None:
    program = capture(Of(lambda x: torch.arange(x.shape[1])).eval(), (torch.full((2, 8), 5),))
    (found,) = lookups(program)
    assert not reads_inputs(found.index) and may_be_negative(program) == []
