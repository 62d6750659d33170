"""Values of a backward that are written where an operand lies: the same numbers in fewer bytes, and never
over what is still read.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from train_helpers import cut_step, differing, eager, everything, run_schedule

from effcompile.capture import capture_training
from effcompile.schedules.blocks import WHOLE
from effcompile.schedules.emit import emit
from effcompile.schedules.into_blocks import in_one_block
from effcompile.schedules.simulate import simulate

aten = torch.ops.aten


class Of(nn.Module):
    """loss = mean(f(tanh(W x)))."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.f = nn.Linear(64, 64, bias=False), f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self.linear(x).tanh()).square().mean()


def _written(h: torch.Tensor) -> torch.Tensor:
    h = h * 2.0
    h[:, :3].mul_(3.0)
    return h


def _row(h: torch.Tensor) -> torch.Tensor:
    h = h * 2.0
    h[1].mul_(3.0)
    return h


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[object]]] = {
    "read thrice": (lambda h: h.sin() * h.cos() + h, {aten.add_.Tensor}),
    "one gradient for two": (lambda h: (h + h.sin()) * 2.0, {aten.add_.Tensor}),
    "columns": (_written, {torch.ops.effcompile.put_slice_.default}),
    "a row": (_row, {torch.ops.effcompile.put_select_.default}),
    "transposed": (lambda h: h.t().contiguous().sin().t() * h.cos(), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_in_fewer_bytes(name: str) -> None:
    f, wanted = CASES[name]
    torch.manual_seed(0)
    model, batch = Of(f).train(), {"x": torch.randn(8, 64)}
    cut = cut_step(capture_training(model, (), batch))
    targets = {way.target for way in cut.written.values()}
    assert targets >= wanted
    found, peak = run_schedule(model, cut, batch, everything(cut))
    assert not differing(found, eager(model, batch))
    assert simulate(cut, emit(cut, everything(cut))).peak_bytes == peak


def test_nothing_is_written_over_that_is_read_later_or_is_a_gradient() -> None:
    """By the graph alone: whoever reads memory that was written into stands after the write, or before it and
    never again.
    """

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(8, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a + self.b  # one gradient for both: neither may be written into
            for _ in range(3):
                h = h * x.sin() + (h.exp() @ x.t() @ h).tanh() + h
            return h.mean()

    cut = cut_step(capture_training(Deep().train(), (torch.randn(8, 64),), {}), measure=False)
    assert cut.written
    order = [node for block in reversed(cut.blocks) for node in block.backward]
    at = {node: i for i, node in enumerate(order)}
    for node, way in cut.written.items():
        memory = [n for n in order if cut.held.of[n] == cut.held.of[way.into]]
        before = [n for n in memory if at[n] < at[node]]
        assert all(at[user] <= at[node] for n in before for user in n.users if user in at)
        assert not {*before} & {*cut.step.all_gradients}


def test_one_block_runs_as_autograd_has_it() -> None:
    cut = cut_step(
        capture_training(Of(CASES["read thrice"][0]).train(), (torch.randn(8, 64),), {}), measure=False
    )
    whole = in_one_block(cut.step, cut.held, lambda node: 0.0)
    (block,) = whole.blocks
    graph = {node: at for at, node in enumerate(cut.step.graph.nodes)}
    assert block.name == WHOLE
    assert [*block.backward] == sorted(block.backward, key=graph.__getitem__)
    assert [*block.forward] == sorted(block.forward, key=graph.__getitem__)
