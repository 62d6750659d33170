"""What the techniques promise, where it can be seen in a second: tickets keep their luck, SNIP finds what
matters, chance explores more.
"""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from sparse_helpers import loss_of, tiny, train
from torch import Tensor, nn

import effcompile
from effcompile.sparse import collect, saliency

SEEDS = range(3)


def judged(model: nn.Module) -> float:
    with torch.no_grad():
        return mean(loss_of(model, 9000 + i).item() for i in range(8))


def lottery(seed: int, initial_weights: bool) -> float:
    """Train, prune to 0.8, train again: from the remembered weights, or from other ones under the
    same mask.
    """
    model = tiny(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsity = effcompile.DynamicSparsity(model, optimizer, sparsity=0.8, block=1, initial="dense", updates=0)
    train(model, optimizer, sparsity, range(3), sparsity.remember)
    train(model, optimizer, sparsity, range(3, 60))
    sparsity.draw_ticket()
    masks = sparsity.masks()
    if initial_weights:
        sparsity.rewind()
    else:
        model = tiny(seed + 100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sparsity = effcompile.DynamicSparsity(
            model, optimizer, sparsity=0.8, block=1, initial=masks, updates=0, execution="masked"
        )
    train(model, optimizer, sparsity, range(3, 60))
    return judged(model)


def test_a_lottery_ticket_learns_more_than_its_mask_on_other_weights() -> None:
    assert mean(lottery(s, initial_weights=True) for s in SEEDS) < mean(
        lottery(s, initial_weights=False) for s in SEEDS
    )


def moving(seed: int, growth: str, updates: int) -> tuple[float, float]:
    """(loss, share of blocks explored)."""
    model = tiny(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsity = effcompile.DynamicSparsity(
        model,
        optimizer,
        sparsity=0.8,
        block=2,
        updates=updates,
        steps=60,
        growth=growth,
        seed=seed,
        execution="masked",  # type: ignore[arg-type]
    )
    train(model, optimizer, sparsity, range(60))
    return judged(model), sparsity.figures().explored


def test_a_moving_pattern_learns_more_than_a_static_one_and_chance_explores_more_than_the_gradient() -> None:
    found = {
        name: [moving(s, *form) for s in SEEDS]
        for name, form in {"static": ("random", 0), "set": ("random", 6), "rigl": ("gradient", 6)}.items()
    }
    loss = {name: mean(run[0] for run in runs) for name, runs in found.items()}
    explored = {name: mean(run[1] for run in runs) for name, runs in found.items()}
    assert loss["set"] < loss["static"]
    assert explored["set"] > explored["rigl"] > explored["static"]


@pytest.mark.parametrize("seed", SEEDS)
def test_snip_keeps_the_blocks_of_the_inputs_that_matter(seed: int) -> None:
    torch.manual_seed(seed)
    target = torch.randn(8, 4)
    data = [torch.randn(64, 32) for _ in range(100)]

    def trained(method: str) -> float:
        torch.manual_seed(seed + 10)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        # 24 of the 32 inputs say nothing
        loss = lambda x: nn.functional.mse_loss(model(x), x[:, 8:16] @ target)  # noqa: E731
        initial: str | dict[str, Tensor] = "random"
        if method == "snip":
            gradient = collect.loss_gradients(model, ["0"], data[:4], loss)["0"]
            initial = saliency.masks(
                {"0": saliency.blocks(saliency.snip(model[0].weight, gradient), 4)}, 0.75
            )
            assert initial["0"][:, 2:4].float().mean() > 0.9
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        sparsity = effcompile.DynamicSparsity(
            model,
            optimizer,
            layers=["0"],
            sparsity=0.75,
            block=4,
            updates=0,
            initial=initial,
            execution="masked",  # type: ignore[arg-type]
        )
        for x in data:
            optimizer.zero_grad()
            loss(x).backward()
            optimizer.step()
            sparsity.step()
        return loss(torch.randn(512, 32)).item()

    assert trained("snip") < trained("random") / 2
