"""What is given to runtimes that raise for no index: a graph that says whether all were in range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from effcompile.backends.indices import flagged
from effcompile.capture import capture

Use = Callable[[Tensor, Tensor], Tensor]
USES: dict[str, Use] = {
    "from the front": lambda x, at: x.gather(1, at),
    "a part of each": lambda x, at: x.index_select(1, at[0]),
    "from the end, too": lambda x, at: x[torch.arange(x.shape[0]).unsqueeze(1), at],
    "where one is written": lambda x, at: x.index_put((torch.arange(x.shape[0]), at[:, 0]), x[:, 0]),
    "beside a mask": lambda x, at: x.index_put((at.sum(1) > -99, at[:1, 0]), torch.zeros(())),
    "of all": lambda x, at: x.take(at),
    "filled": lambda x, at: x.index_fill(1, at[0], 9.0),
}


class Reads(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.use(x * 2, at + 1)


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_flag_says_whether_the_model_would_raise(use: Use) -> None:
    model = Reads(use)
    found = flagged(capture(model, (torch.randn(2, 4), torch.tensor([[0, 1], [2, 0]]))))
    generator = torch.Generator().manual_seed(0)
    raised = 0
    for length in (2, 4, 7):
        for least in range(-9, 9):
            x = torch.randn(2, length, generator=generator)
            at = torch.randint(least, least + 2, (2, 2), generator=generator)
            try:
                wanted = model(x, at)
            except (IndexError, RuntimeError):
                wanted, raised = None, raised + 1
            answer, fine = found.module(x, at)
            assert bool(fine) == (wanted is not None), (length, at)
            assert wanted is None or torch.equal(answer, wanted)
    assert 5 < raised < 50


def test_what_counts_from_the_end_whatever_the_inputs_are_needs_no_flag() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0])
            return x[rows, -1 - rows]

    x = torch.randn(3, 5)
    program = capture(Last(), (x,))
    found = flagged(program)
    assert len(found.outputs) == len(program.outputs)
    (node,) = found.calls(torch.ops.aten.index.Tensor)
    assert node.args[1][1] not in list(found.calls(torch.ops.aten.rsub.Scalar))
    assert torch.equal(found.module(x), Last()(x))
