"""The controller under training: the pattern holds and moves, new weights start from nothing, any optimizer
follows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_helpers import LINEARS, Tiny, elements, loss_of, tiny, train
from torch import nn

import effcompile
from effcompile.sparse.recipe import learning_rate_factor

EXECUTIONS = ["masked", "blocks"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
}


def made(
    execution: str = "masked", *, optimizer: Any = torch.optim.AdamW, seed: int = 0, **request: Any
) -> tuple[Tiny, Any, Any]:
    model = tiny(seed)
    if optimizer is torch.optim.SGD:
        trainer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        trainer = optimizer(model.parameters(), lr=1e-2)
    request = {"sparsity": 0.5, "block": 4, "updates": 4, "steps": 20, **request}
    return model, trainer, effcompile.DynamicSparsity(model, trainer, execution=execution, **request)


def dense_weights(sparsity: effcompile.DynamicSparsity) -> dict[str, torch.Tensor]:
    return {held.name: held.dense().clone() for held in sparsity._held}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "request_", [{}, {"distribution": "global"}, {"balanced": True}, {"growth": "gradient"}], ids=str
)
def test_the_pattern_holds_between_updates_and_moves_at_them(
    execution: str, request_: dict[str, Any]
) -> None:
    model, optimizer, sparsity = made(execution, **request_)
    total = sum(int(mask.sum()) for mask in sparsity.masks().values())
    moved = []

    before = sparsity.masks()

    def check() -> None:
        nonlocal before
        masks = sparsity.masks()
        assert sum(int(mask.sum()) for mask in masks.values()) == total
        for name, weight in dense_weights(sparsity).items():
            assert not weight[~elements(sparsity, name)].any()
        moved.append(any(not torch.equal(masks[name], before[name]) for name in masks))
        before = masks

    losses = train(model, optimizer, sparsity, range(24), check)
    assert [step for step, there in enumerate(moved, start=1) if there] == [4, 8, 12, 16]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("growth", ["random", "gradient"])
@pytest.mark.parametrize("distribution", ["uniform", "global"])
def test_blocks_and_masks_are_one_training(growth: str, distribution: str) -> None:
    found = {}
    for execution in EXECUTIONS:
        model, optimizer, sparsity = made(execution, growth=growth, distribution=distribution)
        found[execution] = (
            train(model, optimizer, sparsity, range(14), clip=1.0),
            dense_weights(sparsity),
            sparsity.masks(),
        )
    assert found["masked"][0] == pytest.approx(found["blocks"][0], rel=1e-4)
    for name, weight in found["masked"][1].items():
        torch.testing.assert_close(weight, found["blocks"][1][name], rtol=1e-3, atol=1e-5)
        assert torch.equal(found["masked"][2][name], found["blocks"][2][name])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_starts_new_blocks_from_nothing(name: str, execution: str) -> None:
    _, optimizer, sparsity = made(execution, optimizer=OPTIMIZERS[name], updates=1, steps=10)
    model = sparsity.model
    train(model, optimizer, sparsity, range(4))
    old = {held.name: (held.mask, held.dense().clone()) for held in sparsity._held}
    kept_state = {held.name: _dense_state(optimizer, held) for held in sparsity._held}
    counts = {held.name: _other_state(optimizer, held) for held in sparsity._held}
    train(model, optimizer, sparsity, range(4, 5))  # step 5: the update
    assert sparsity.figures().updates_done == 1
    moved = 0
    for held in sparsity._held:
        fresh = held.mask & ~old[held.name][0]
        at = fresh.repeat_interleave(4, 0).repeat_interleave(4, 1)
        moved += int(fresh.sum())
        assert not held.dense()[at].any()
        for entry, state in _dense_state(optimizer, held).items():
            begins = {"step_size": 1e-2}.get(entry, 0.0)
            torch.testing.assert_close(state[at], torch.full_like(state[at], begins))
            stays = (held.mask & old[held.name][0]).repeat_interleave(4, 0).repeat_interleave(4, 1)
            if entry not in ("prev",):
                assert not kept_state[held.name][entry][stays].eq(0).all()
                assert not state[stays].eq(0).all()
        for entry, value in _other_state(optimizer, held).items():
            before = counts[held.name][entry]
            assert value.shape == before.shape
            if entry == "step":
                assert float(value) == float(before) + 1
    assert moved > 0


def _dense_state(optimizer: Any, held: Any) -> dict[str, torch.Tensor]:
    """State tensors of a weight's shape, as dense matrices."""
    found = {}
    for entry, value in optimizer.state[held.parameter].items():
        if isinstance(value, torch.Tensor) and value.shape == held.parameter.shape:
            whole = value
            if held.execution == "blocks":
                pattern = held.layer.pattern()
                whole = pattern.to_dense(value[: pattern.nnz])
            found[entry] = whole.clone()
    return found


def _other_state(optimizer: Any, held: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state[held.parameter]
    return {
        k: v.clone()
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and v.shape != held.parameter.shape
    }


def test_muon_mixes_entries_and_the_pattern_still_holds() -> None:
    model = tiny()
    matrices = [module.weight for name, module in model.named_modules() if name in LINEARS]
    optimizer = torch.optim.Muon(matrices, lr=1e-2)
    sparsity = effcompile.DynamicSparsity(model, optimizer, sparsity=0.5, block=4, updates=2, steps=9)
    assert {held.execution for held in sparsity._held} == {"masked"}
    train(model, optimizer, sparsity, range(9))
    assert all(
        not weight[~elements(sparsity, name)].any() for name, weight in dense_weights(sparsity).items()
    )


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_moments_of_a_model_in_training_are_kept_for_the_blocks_that_stay(execution: str) -> None:
    model = tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, None, range(3))
    before = {name: optimizer.state[model.get_submodule(name).weight]["exp_avg"].clone() for name in LINEARS}
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.5, block=4, initial="magnitude", execution=execution
    )
    for held in sparsity._held:
        expected = before[held.name] * elements(sparsity, held.name)
        torch.testing.assert_close(_dense_state(optimizer, held)["exp_avg"], expected)
    assert {int(optimizer.state[held.parameter]["step"]) for held in sparsity._held} == {3}


def test_factored_moments_move_with_their_blocks_and_start_anew_with_another_form() -> None:
    model = tiny()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    train(model, optimizer, None, range(3))
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.5, block=4, updates=1, steps=4, execution="blocks"
    )
    # rows of a matrix are no rows of blocks
    assert not any(held.parameter in optimizer.state for held in sparsity._held)
    train(model, optimizer, sparsity, range(1))
    before = {
        held.name: (held.layer.pattern(), optimizer.state[held.parameter]["row_var"].clone())
        for held in sparsity._held
    }
    for held in sparsity._held:
        held.parameter.grad = torch.zeros_like(held.parameter)
    sparsity.update()
    for held in sparsity._held:
        old, rows = before[held.name]
        places = held.layer.pattern().places_in(old)
        assert (places < 0).any()
        found = optimizer.state[held.parameter]["row_var"]
        for place, came_from in enumerate(places.tolist()):
            assert torch.equal(found[place], rows[came_from] if came_from >= 0 else torch.zeros_like(rows[0]))
    sparsity.release()
    losses = train(model, optimizer, None, range(1, 6))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_clipping_sees_the_sparse_gradient_only(execution: str) -> None:
    model, _, sparsity = made(execution)
    loss_of(model, 0).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    reference = tiny()
    for name, weight in dense_weights(sparsity).items():
        reference.get_submodule(name).weight.data.copy_(weight)
    loss_of(reference, 0).backward()
    for name in LINEARS:
        reference.get_submodule(name).weight.grad *= elements(sparsity, name)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in reference.parameters()]))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_gradient_growth_takes_the_blocks_of_largest_dense_gradient(execution: str) -> None:
    model, optimizer, sparsity = made(
        execution, optimizer=torch.optim.SGD, growth="gradient", updates=1, steps=4
    )
    train(model, optimizer, sparsity, range(1))
    old, weights = sparsity.masks(), dense_weights(sparsity)
    reference = tiny()  # the same weights, dense: its gradient is what the blocks are chosen by
    others = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        layer = name.removesuffix(".weight")
        parameter.data.copy_(weights[layer] if layer in weights else others[name])
    loss_of(reference, 1).backward()
    train(model, optimizer, sparsity, range(1, 2))
    for held in sparsity._held:
        gradient = (
            reference.get_submodule(held.name)
            .weight.grad.abs()
            .unflatten(0, (-1, 4))
            .unflatten(2, (-1, 4))
            .sum(dim=(1, 3))
        )
        came = held.mask & ~old[held.name]
        free = ~held.mask & ~old[held.name]
        assert came.any()
        assert gradient[came].min() >= gradient[free].max() * (1 - 1e-5)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_schedulers_and_param_groups_go_on(execution: str) -> None:
    model = tiny()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1, "lr": 1e-2},
            {"params": rest, "weight_decay": 0.0, "lr": 2e-2},
        ]
    )
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=0.5, block=4, updates=3, steps=12, execution=execution
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    losses = train(model, optimizer, sparsity, range(12), scheduler.step)
    assert losses[-1] < losses[0]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_the_learning_rate_law_is_applied_only_when_asked() -> None:
    assert learning_rate_factor(0.0) == 1.0
    assert learning_rate_factor(0.9) == pytest.approx(6.4, abs=0.01)
    model, optimizer, sparsity = made(sparsity=0.5)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    sparsity.scale_learning_rates()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * math.exp(1.969 * 0.25 + 0.2905 * 0.5))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(effcompile.UsageError, match="before making it"):
        sparsity.scale_learning_rates()
    assert isinstance(model, Tiny)


def test_embeddings_and_heads_stay_dense_and_updates_explore() -> None:
    model, optimizer, sparsity = made(updates=8, steps=40)
    assert set(sparsity.masks()) == set(LINEARS)
    first = sparsity.figures().explored
    train(model, optimizer, sparsity, range(40))
    assert sparsity.figures().explored > first
    assert model.head.weight.ne(0).all()
    static_model, static_optimizer, static = made(updates=0)
    train(static_model, static_optimizer, static, range(10))
    assert static.figures().explored == static.figures().density == pytest.approx(0.5)
    with pytest.raises(effcompile.UsageError, match="static"):
        static.update()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_release_gives_plain_linears_and_their_moments_back(execution: str) -> None:
    model, optimizer, sparsity = made(execution)
    train(model, optimizer, sparsity, range(6))
    tokens = torch.arange(8)[None]
    before, masks = model(tokens), {name: elements(sparsity, name) for name in LINEARS}
    sparsity.release()
    torch.testing.assert_close(model(tokens), before)
    assert set(model.state_dict()) == set(tiny().state_dict())
    for name in LINEARS:
        weight = model.get_submodule(name).weight
        assert not weight[~masks[name]].any()
        assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    train(model, optimizer, None, range(6, 8))  # trains on, dense
    assert any(model.get_submodule(name).weight[~masks[name]].any() for name in LINEARS)


@pytest.mark.parametrize(
    ("execution", "growth"), [("masked", "random"), ("masked", "gradient"), ("blocks", "random")]
)
def test_updates_compile_nothing_again(execution: str, growth: str) -> None:
    model, optimizer, sparsity = made(execution, growth=growth, updates=3, steps=8)
    torch._dynamo.reset()
    compilations = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    masks = sparsity.masks()
    train(compiled, optimizer, sparsity, range(1))
    first = compilations
    train(compiled, optimizer, sparsity, range(1, 8))
    assert compilations == first > 0
    assert sparsity.figures().updates_done == 3
    assert any(not torch.equal(mask, masks[name]) for name, mask in sparsity.masks().items())


@pytest.mark.parametrize(("request_", "reason", "wanted"), [
    ({"sparsity": 0.75}, None, "blocks"),
    ({"sparsity": 0.75}, "no compiler", "masked"),
    ({"sparsity": 0.25}, None, "masked"),
    ({"sparsity": 0.75, "initial": "dense"}, None, "masked"),
    ({"sparsity": 0.75, "block": 2}, None, "masked"),
])  # fmt: skip
def test_auto_takes_blocks_where_kernels_run_them(
    request_: dict[str, Any], reason: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcompile.sparse.hold.fallback_reason", lambda x, block: reason)
    _, _, sparsity = made("auto", **request_)
    assert {held.execution for held in sparsity._held} == {wanted}
