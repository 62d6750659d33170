"""DynamicSparsity under DDP on gloo ranks: one pattern, that of one process with all examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import effcompile
from effcompile.proof.parallel.processes import on_ranks
from effcompile.sparse.recipe import Execution, Growth

STEPS, EXAMPLES = 6, 8
WAYS: tuple[tuple[Growth, Execution], ...] = (
    ("random", "masked"),
    ("gradient", "masked"),
    ("gradient", "blocks"),
)


def trained(growth: Growth, execution: Execution, rank: int, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """(the layer's mask after every step, all parameters at the end), of this rank's examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsity = effcompile.DynamicSparsity(
        model,
        optimizer,
        sparsity=0.5,
        block=4,
        layers=["0"],
        growth=growth,
        updates=2,
        steps=STEPS,
        execution=execution,
    )
    wrapped = model if ranks == 1 else DistributedDataParallel(model)
    masks = []
    for step in range(STEPS):
        x = torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsity.step()
        masks.append(sparsity.masks()["0"])
    return masks, [parameter.detach().clone() for parameter in model.parameters()]


def on_rank(rank: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [trained(*way, rank, 2) for way in WAYS]


def test_ranks_have_the_pattern_of_one_process() -> None:
    found = on_ranks(on_rank, 2)
    for number, way in enumerate(WAYS):
        masks, parameters = trained(*way, 0, 1)
        assert any(not torch.equal(masks[0], mask) for mask in masks)
        for rank in found:
            for mine, wanted in zip(rank[number][0], masks, strict=True):
                assert torch.equal(mine, wanted)
            torch.testing.assert_close(rank[number][1], parameters)
