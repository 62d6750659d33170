"""A sparse training under a memory budget: what is counted, what is said, and that it trains as it does
unplanned.
"""

from __future__ import annotations

import copy

import pytest
import torch
from sparse_helpers import Tiny, tiny
from torch import Tensor, nn

import effcompile
from effcompile.sparse import costs

#: Few, so that weights and not activations make the peak.
TOKENS = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))


class Loss(nn.Module):
    """Tokens → the loss of predicting the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Tiny = tiny(width=64)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.model(tokens).flatten(0, 1), ((tokens * 3 + 1) % 16).flatten()
        )


def sparse(model: nn.Module) -> tuple[torch.optim.Optimizer, effcompile.DynamicSparsity]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.75, block=8, steps=4, updates=3, execution="blocks"
    )


def planned(model: nn.Module, optimizer: torch.optim.Optimizer, **goal: object) -> nn.Module:
    passes = ["no-offload", "states.offload=false"]
    return effcompile.optimize(
        model, inputs=(TOKENS,), mode="training", optimizer=optimizer, passes=passes, **goal
    )


def step(run: nn.Module, optimizer: torch.optim.Optimizer, sparsity: effcompile.DynamicSparsity) -> float:
    optimizer.zero_grad()
    loss = run(TOKENS)
    loss.backward()
    optimizer.step()
    sparsity.step()
    return float(loss.detach())


@pytest.mark.slow
def test_a_planned_sparse_training_counts_blocks_names_the_matched_model_and_trains_alike() -> None:
    model = Loss()
    dense = copy.deepcopy(model)
    optimizer, sparsity = sparse(model)
    twin = Loss()
    its_optimizer, its_sparsity = sparse(twin)

    whole = planned(dense, torch.optim.AdamW(dense.parameters())).plan
    free = planned(model, optimizer).plan
    saved = sum(p.nbytes for p in dense.parameters()) - sum(p.nbytes for p in model.parameters())
    patterns = sum(b.nbytes for b in model.buffers())
    assert saved > 2 * patterns > 0
    assert (
        whole.decision("optimizer").cost.bytes_kept - free.decision("optimizer").cost.bytes_kept == 2 * saved
    )
    # the weights and both moments are alive at every peak, gradients at most of them; the kernels have
    # workspace of their own
    assert 3 * saved - patterns <= whole.predicted.peak_bytes - free.predicted.peak_bytes <= 4 * saved
    assert free.measured.peak_bytes == free.predicted.peak_bytes

    budget = free.predicted.peak_bytes
    run = planned(model, optimizer, memory=budget)
    plan = run.plan
    assert plan.measured.peak_bytes <= budget and all(check.passed for check in plan.checks)
    flops = sparsity.figures().flops
    assert costs.per_row_of(model) == flops and flops.matched_note() in plan.notes
    for _ in range(5):
        assert step(run, optimizer, sparsity) == pytest.approx(
            step(twin, its_optimizer, its_sparsity), rel=1e-5
        )
    assert sparsity.figures().explored > 0.25  # it moved, under one plan


def test_a_dense_model_has_no_matched_one() -> None:
    assert costs.per_row_of(Loss()) is None
