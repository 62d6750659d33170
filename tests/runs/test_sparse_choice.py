"""Which layers train sparse: the choice against every one there is, by the same times; and what cannot be."""

import itertools

import pytest
import torch
from torch import nn

from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.runs import sparse_choice
from effcompile.runs.sparse_choice import sparse_layers
from effcompile.sparse.costs import RowTimes

SECONDS = {4: 0.9, 8: 0.5, 16: 0.2}


class Stack(nn.Module):
    """Blocks with a large and a small linear, and one that blocks of 16 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "odd": nn.Linear(64, 40), "down": nn.Linear(40, 32)})
            for _ in range(2)
        )
        self.unused = nn.ModuleList([nn.ModuleDict({"idle": nn.Linear(16, 16)})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["odd"](torch.relu(block["up"](x)))))  # type: ignore[index]
        return x.square().mean()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A model on a machine where a product takes its FLOPs, and sparse ones by their block the more."""

    def seconds(
        sparse: nn.Module, weight: torch.Tensor, shape: tuple[int, int], rows: RowTimes, rounds: int
    ) -> tuple[float, float]:
        dense = shape[0] * shape[1] * rows.forward * 1e-9
        slow = 2.0 if shape == (40, 64) else 1.0  # one layer is faster dense
        return dense * SECONDS[weight.shape[1]] * slow, dense

    monkeypatch.setattr(sparse_choice, "layer_seconds", seconds)
    return Stack().train()


def asked(model: Stack, **changes: object) -> sparse_choice.SparseLayers:
    return sparse_layers(model, lambda: model(torch.randn(8, 32)), **changes)  # type: ignore[arg-type]


def test_the_fastest_choice_is_that_of_all_there_are(model: Stack) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    every = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and "idle" not in name]
    weights = {name: model.get_submodule(name).weight.shape for name in every}
    beside = (
        sum(p.numel() for n, p in model.named_parameters() if n.removesuffix(".weight") not in every) * 16
    )

    def bytes_of(elements: int) -> int:
        return 16 * elements + 4  # weight, gradient, two moments, and a counter

    counters = 4 * sum(1 for n, _ in model.named_parameters() if n.removesuffix(".weight") not in every)
    for memory in (None, 200_000, 120_000):
        found = asked(model, optimizer=optimizer, memory=memory)
        choices = []
        for block, sides in itertools.product(SECONDS, itertools.product((False, True), repeat=len(every))):
            seconds = used = 0.0
            for name, sparse in zip(every, sides, strict=True):
                n, k = weights[name]
                fits = n % block == 0 and k % block == 0
                if sparse and not fits:
                    break
                kept = max(1, round(0.1 * n * k / block**2)) * block**2
                slow = 2.0 if (n, k) == (40, 64) else 1.0
                seconds += n * k * 8e-9 * (SECONDS[block] * slow if sparse else 1.0)
                used += bytes_of(kept if sparse else n * k)
            else:
                if memory is None or used + beside + counters <= memory:
                    choices.append(seconds)
        assert found.seconds == pytest.approx(min(choices), rel=0.011)
    assert found.dense_seconds == pytest.approx(sum(n * k * 8e-9 for n, k in weights.values()))
    assert found.left_out == {"unused.0.idle": "the loss does not run it"}


def test_eps_is_the_time_of_a_sparse_flop_and_each_block_is_told(model: Stack) -> None:
    found = asked(model)
    assert [trial.block for trial in found.trials] == [16, 8, 4] and found.seconds < found.dense_seconds
    assert found.block == 8 and found.layers == (
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
    )
    sixteen, eight, _ = found.trials
    assert sixteen.layers == ("blocks.0.up", "blocks.1.up")
    assert set(sixteen.eps) == {"blocks.0.up", "blocks.1.up"}  # 16 does not divide 40
    assert eight.eps["blocks.0.up"] == pytest.approx(SECONDS[8] / 0.1, rel=0.1)


def test_what_cannot_be_is_refused(model: Stack) -> None:
    with pytest.raises(InfeasibleError):
        asked(model, memory=1000)
    for wrong in ({"sparsity": 0.0}, {"sparsity": 1.0}, {"blocks": ()}):
        with pytest.raises(UsageError, match="a share between 0 and 1"):
            asked(model, **wrong)


def test_it_runs_here_and_leaves_the_model_as_it_was() -> None:
    model = Stack().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = asked(model, blocks=(16,))
    assert all(eps > 0 for trial in found.trials for eps in trial.eps.values())
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
