"""FLOPs against sums by hand, the matched dense model against one that is built, and eps on a clock that is
ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_helpers import LINEARS, Tiny, loss_of, tiny, train
from torch import Tensor, nn

import effcompile
from effcompile.core.torch_compat import flop_counter
from effcompile.ir.sparsity import Efficiency, StepFlops
from effcompile.sparse import costs


class Attending(nn.Module):
    """A transformer whose attention is a fused kernel: (N, T) tokens → logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def step_flops(model: nn.Module) -> float:
    with flop_counter() as counter:
        loss_of(model, 0).backward()
    return counter.get_total_flops()


def sparse(model: nn.Module, execution: str = "masked", **request: Any) -> effcompile.DynamicSparsity:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return effcompile.DynamicSparsity(
        model, optimizer, **{"sparsity": 0.75, "block": 4, "execution": execution, **request}
    )


@pytest.mark.parametrize("execution", ["masked", "blocks"])
def test_a_step_is_counted_as_by_hand(execution: str) -> None:
    sparsity = sparse(tiny(), execution)
    flops = sparsity.measure(lambda: loss_of(sparsity.model, 0), rounds=1).flops
    rows = 4 * 8
    weights = 2 * (16 * 16 + 2 * 16 * 32)
    assert flops.inside == 6 * rows * weights  # forward, the weight's gradient, the input's
    assert flops.outside == 6 * rows * 16 * 16
    assert flops.rest == 0
    assert flops.dense == step_flops(tiny())
    active = sum(int(mask.sum()) for mask in sparsity.masks().values()) * 16
    assert flops.sparse == flops.outside + 6 * rows * active


@pytest.mark.parametrize("execution", ["masked", "blocks"])
def test_attention_is_counted_apart(execution: str) -> None:
    model = Attending(16)
    whole = step_flops(model)
    sparsity = sparse(model, execution)
    flops = sparsity.measure(lambda: loss_of(model, 0), rounds=1).flops
    assert flops.dense == whole
    assert flops.rest == whole - 6 * 32 * (2 * 4 * 16 * 16 + 16 * 16) > 0


def test_the_matched_width_is_that_of_a_model_which_costs_as_much() -> None:
    sparsity = sparse(Attending(64))
    flops = sparsity.measure(lambda: loss_of(sparsity.model, 0), rounds=1).flops
    width = 64 * flops.matched_width()
    below, above = (step_flops(Attending(2 * (int(width) // 2 + more))) for more in (0, 1))
    assert below <= flops.sparse <= above


def test_the_matched_depth_is_that_of_a_model_which_costs_as_much() -> None:
    flops = StepFlops(inside=100, outside=10, rest=20, saved=60)
    depth = flops.matched_depth()
    assert depth is not None
    assert 120 * depth + 10 == pytest.approx(flops.sparse)
    assert StepFlops(inside=100, outside=200, rest=0, saved=90).matched_depth() == pytest.approx(0.1)
    assert StepFlops(inside=100, outside=200, rest=0, saved=100).matched_depth() is None
    assert StepFlops(inside=100, outside=10, rest=20, saved=0).matched_width() == pytest.approx(1)


def test_before_measuring_linear_layers_are_counted_per_row() -> None:
    sparsity = sparse(tiny())
    figures = sparsity.figures()
    assert figures.flops.of == "row"
    assert figures.flops.inside == 6 * 2 * (16 * 16 + 2 * 16 * 32)
    assert figures.efficiency is None
    assert (figures.width, figures.depth) == (16, 2)


@pytest.mark.parametrize("execution", ["masked", "blocks"])
def test_measuring_leaves_no_trace(execution: str) -> None:
    def run(measured: bool) -> tuple[list[float], Tensor]:
        model = tiny()
        sparsity = sparse(model, execution, growth="gradient", updates=2, steps=6)
        # the next step is an update: gradients are being collected
        train(model, sparsity.optimizer, sparsity, range(1))
        torch.manual_seed(3)
        if measured:
            sparsity.measure(lambda: loss_of(model, 7) + 0 * torch.rand(()), rounds=1)
        return train(model, sparsity.optimizer, sparsity, range(1, 6)), torch.rand(1)

    assert run(measured=True) == run(measured=False)


def test_eps_compares_time_per_flop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which sparse layers take half the time of dense ones, eps is half the ratio of the
    FLOPs.
    """
    monkeypatch.setattr(
        costs,
        "interleaved",
        lambda fns, rounds: {name: [1.0 if name == "sparse" else 2.0] * 2 for name in fns},
    )
    sparsity = sparse(tiny(), "blocks")
    found = sparsity.measure(lambda: loss_of(sparsity.model, 0)).efficiency
    assert found is not None
    assert found.dense_seconds == 2 * found.sparse_seconds == 2 * len(LINEARS)
    assert found.eps == pytest.approx(found.break_even / 2)
    assert found.break_even == pytest.approx(4)


def test_eps_of_equal_speed_per_flop_is_one() -> None:
    assert Efficiency(sparse_seconds=1, dense_seconds=10, sparse_flops=2, dense_flops=20).eps == 1


def test_a_loss_that_is_none_is_refused() -> None:
    sparsity = sparse(tiny())
    for loss in (lambda: torch.ones(3), lambda: torch.tensor(1.0), lambda: None):
        with pytest.raises(effcompile.UsageError, match="return the training loss"):
            sparsity.measure(loss)  # type: ignore[arg-type]
    assert isinstance(sparsity.model, Tiny)
