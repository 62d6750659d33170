"""Norms and gradients against loops, and the masks made of them as a controller's first pattern."""

from __future__ import annotations

import pytest
import torch
from sparse_helpers import LINEARS, loss_of, tiny, train
from torch import nn

import effcompile
from effcompile.sparse import collect, saliency


def test_norms_are_those_of_all_rows_of_all_batches() -> None:
    layer = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    batches = [torch.randn(2, 5, 3), torch.randn(4, 3)]
    found = collect.input_norms(layer, ["1"], batches, layer)
    rows = [row for batch in batches for row in batch.reshape(-1, 3).tolist()]
    wanted = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in range(3)]
    assert found["1"].tolist() == pytest.approx(wanted)
    layer(batches[0])
    assert not layer[1]._forward_pre_hooks


def test_gradients_are_sums_over_batches_and_leave_no_trace() -> None:
    model = tiny()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    found = collect.loss_gradients(model, LINEARS, range(3), lambda step: loss_of(model, step))
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.blocks[0].up.weight.grad is None
    for step in range(3):
        loss_of(model, step).backward()
    for name in LINEARS:
        torch.testing.assert_close(found[name], model.get_submodule(name).weight.grad)


def test_a_layer_that_nothing_reaches_is_named() -> None:
    model = tiny()
    with pytest.raises(effcompile.UsageError, match=r"No batch reached blocks\.0\.mix"):
        collect.input_norms(model, LINEARS, [], model)
    with pytest.raises(effcompile.UsageError, match="No batch reached head"):
        collect.loss_gradients(model, ["head"], range(1), lambda _: model.embed.weight.sum())


@pytest.mark.parametrize("method", ["wanda", "snip"])
def test_their_masks_are_a_first_pattern(method: str) -> None:
    model = tiny()
    weights = {name: model.get_submodule(name).weight for name in LINEARS}
    if method == "wanda":
        norms = collect.input_norms(model, LINEARS, [torch.arange(16)[None]], model)
        element = {name: saliency.wanda(weight, norms[name]) for name, weight in weights.items()}
    else:
        gradients = collect.loss_gradients(model, LINEARS, range(2), lambda step: loss_of(model, step))
        element = {name: saliency.snip(weight, gradients[name]) for name, weight in weights.items()}
    masks = saliency.masks({name: saliency.blocks(s, 4) for name, s in element.items()}, 0.75, "global")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.75, block=4, initial=masks, updates=2, steps=12, execution="masked"
    )
    assert all(torch.equal(mask, masks[name]) for name, mask in sparsity.masks().items())
    losses = train(model, optimizer, sparsity, range(12))
    assert losses[-1] < losses[0]
