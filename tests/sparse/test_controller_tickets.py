"""Early-bird and lottery tickets: when masks settle, rewinding, and neurons that leave for good."""

from __future__ import annotations

import math

import pytest
import torch
from sparse_helpers import LINEARS, elements, loss_of, tiny, train

import effcompile
from effcompile.sparse.tickets import EarlyBird, find_neurons, mask_distance, neuron_masks

ROWS, COLUMNS = ["blocks.*.up"], ["blocks.*.down"]


def dense_run(**request: object) -> tuple[torch.nn.Module, torch.optim.Optimizer, effcompile.DynamicSparsity]:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arguments = {"sparsity": 0.75, "block": 4, "initial": "dense", "updates": 0, **request}
    return model, optimizer, effcompile.DynamicSparsity(model, optimizer, **arguments)  # type: ignore[arg-type]


def test_distance_is_the_share_of_entries_that_differ() -> None:
    a = {"x": torch.tensor([True, False, True]), "y": torch.tensor([[True]])}
    b = {"x": torch.tensor([True, True, False]), "y": torch.tensor([[True]])}
    assert mask_distance(a, b) == 0.5
    assert mask_distance(a, a) == 0


def test_a_ticket_is_found_when_the_last_masks_agree() -> None:
    bird = EarlyBird(threshold=0.1, window=3)
    one, other = {"x": torch.tensor([True, False])}, {"x": torch.tensor([False, True])}
    assert [bird.observe(m) for m in (one, other, other)] == [False, False, False]
    assert bird.distance == 1.0
    assert bird.observe(other)
    assert bird.distance == 0.0
    assert not bird.observe(one)
    for _ in range(2):  # masks of something else
        assert not bird.observe({"y": torch.tensor([True])})
    assert bird.observe({"y": torch.tensor([True])})


def test_masks_settle_as_training_does() -> None:
    model, optimizer, sparsity = dense_run()
    assert sparsity.ticket_distance == math.inf
    distances = []
    for phase in range(30):
        if sparsity.watch_ticket(threshold=0.05, window=3):
            break
        distances.append(sparsity.ticket_distance)
        train(model, optimizer, sparsity, range(3 * phase, 3 * phase + 3))
    else:
        pytest.fail(f"no ticket was found: {distances}")
    assert len(distances) > 2
    assert distances[2] > sparsity.ticket_distance
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in LINEARS}
    sparsity.draw_ticket()
    for name, mask in sparsity.masks().items():
        assert int(mask.sum()) == round(mask.numel() * 0.25)
        scores = weights[name].abs().unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).sum(dim=(1, 3))
        assert scores[mask].min() >= scores[~mask].max()


def test_rewinding_trains_the_ticket_from_the_remembered_step() -> None:
    model, optimizer, sparsity = dense_run()
    train(model, optimizer, sparsity, range(3))
    sparsity.remember()
    early = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {name: optimizer.state[model.get_submodule(name).weight]["exp_avg"].clone() for name in LINEARS}
    train(model, optimizer, sparsity, range(3, 20))
    sparsity.draw_ticket()
    late = sparsity.masks()
    sparsity.rewind()
    for name, value in model.state_dict().items():
        layer = name.removesuffix(".weight")
        wanted = early[name] * elements(sparsity, layer) if layer in LINEARS else early[name]
        assert torch.equal(value, wanted), name
    for name in LINEARS:
        state = optimizer.state[model.get_submodule(name).weight]
        assert torch.equal(state["exp_avg"], moments[name] * elements(sparsity, name))
        assert int(state["step"]) == 3
    assert all(torch.equal(mask, late[name]) for name, mask in sparsity.masks().items())
    losses = train(model, optimizer, sparsity, range(3, 20))
    assert losses[-1] < losses[0]
    sparsity.draw_ticket(0.9)  # iterative pruning: within the ticket, further
    for name, mask in sparsity.masks().items():
        assert not (mask & ~late[name]).any()
        assert int(mask.sum()) == round(mask.numel() * 0.1)
    sparsity.rewind()
    assert torch.equal(model.get_submodule("head").weight, early["head.weight"])


def test_a_moving_run_in_blocks_rewinds_under_its_new_pattern() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.5, block=4, updates=2, steps=9, execution="blocks"
    )
    train(model, optimizer, sparsity, range(1))
    sparsity.remember()
    early = {held.name: held.dense().clone() for held in sparsity._held}
    train(model, optimizer, sparsity, range(1, 9))
    masks = sparsity.masks()
    sparsity.rewind()
    for held in sparsity._held:
        assert torch.equal(held.mask, masks[held.name])
        assert torch.equal(held.dense(), early[held.name] * elements(sparsity, held.name))


def test_a_run_with_something_remembered_resumes() -> None:
    model, optimizer, sparsity = dense_run()
    sparsity.remember()
    sparsity.watch_ticket()
    train(model, optimizer, sparsity, range(4))
    again_model, again_optimizer, again = dense_run()
    for part, other in ((again_model, model), (again_optimizer, optimizer), (again, sparsity)):
        part.load_state_dict(other.state_dict())
    for run in (sparsity, again):
        run.draw_ticket()
        run.rewind()
    for a, b in zip(model.parameters(), again_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rewinding_to_nothing_is_refused() -> None:
    with pytest.raises(effcompile.UsageError, match=r"remember\(\)"):
        dense_run()[2].rewind()


def test_neurons_leave_weights_and_moments() -> None:
    model, optimizer, sparsity = dense_run(sparsity=0.5)
    train(model, optimizer, sparsity, range(5))
    sets = find_neurons(model, ROWS, COLUMNS)
    masks = neuron_masks(model, sets, 0.5)
    tokens = torch.arange(8)[None]
    reference = tiny()
    reference.load_state_dict(model.state_dict())
    for block, mask in zip(reference.blocks, masks.values(), strict=True):
        assert int(mask.sum()) == 16
        scores = block.up.weight.abs().sum(dim=1) + block.down.weight.abs().sum(dim=0)
        assert scores[mask].min() >= scores[~mask].max()
        block.down.weight.data[:, ~mask] = 0  # a neuron that nobody reads is one that is not there
    first = model.blocks[0].up
    kept = optimizer.state[first.weight]["exp_avg"][masks["blocks.0.up"]].clone()
    assert not sparsity.watch_ticket(ROWS, COLUMNS)
    sparsity.shrink_neurons(ROWS, COLUMNS)
    torch.testing.assert_close(model(tokens), reference(tokens))
    assert (first.out_features, model.blocks[0].down.in_features) == (16, 16)
    assert torch.equal(optimizer.state[first.weight]["exp_avg"], kept)
    assert set(sparsity.masks()) == {"blocks.0.mix", "blocks.1.mix"}
    losses = train(model, optimizer, sparsity, range(5, 15))
    assert losses[-1] < losses[0]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }


@pytest.mark.parametrize("execution", ["masked", "blocks"])
def test_neurons_of_a_sparse_layer_are_refused(execution: str) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsity = effcompile.DynamicSparsity(model, optimizer, sparsity=0.5, block=4, execution=execution)  # type: ignore[arg-type]
    with pytest.raises(effcompile.UsageError, match="sparse in blocks already"):
        sparsity.shrink_neurons(ROWS, COLUMNS)


def test_sets_that_are_none_are_refused() -> None:
    _, _, sparsity = dense_run()
    with pytest.raises(effcompile.UsageError, match="no one set of neurons"):
        sparsity.shrink_neurons(["blocks.*.up"], ["blocks.*.mix"])
    with pytest.raises(effcompile.UnknownNameError, match=r"blocks\.\*\.gate"):
        sparsity.shrink_neurons(["blocks.*.gate"], COLUMNS)


def test_a_drawn_ticket_trains_on_when_compacted() -> None:
    model, optimizer, sparsity = dense_run()
    train(model, optimizer, sparsity, range(3))
    sparsity.draw_ticket()
    before, masks = loss_of(model, 3).item(), sparsity.masks()
    sparsity.compact()
    assert loss_of(model, 3).item() == pytest.approx(before, rel=1e-5)
    train(model, optimizer, sparsity, range(3, 6))
    assert all(torch.equal(mask, masks[name]) for name, mask in sparsity.masks().items())
