"""Saved and resumed, a run is bit for bit the run that was not interrupted."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from sparse_helpers import tiny, train
from torch import nn

import effcompile

Run = tuple[nn.Module, torch.optim.Optimizer, effcompile.DynamicSparsity]


def made(seed: int = 0, **request: Any) -> Run:
    model = tiny(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (
        model,
        optimizer,
        effcompile.DynamicSparsity(
            model, optimizer, **{"sparsity": 0.5, "block": 4, "updates": 6, "steps": 21, **request}
        ),
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["model first", "controller first"])
@pytest.mark.parametrize("execution", ["masked", "blocks"])
@pytest.mark.parametrize(
    "request_",
    [{}, {"growth": "gradient"}, {"distribution": "global"}, {"balanced": True, "sparsity": 0.75}],
    ids=str,
)
@pytest.mark.parametrize("stop", [7, 8])  # step 8 is one before an update: by gradient it is being collected
def test_a_resumed_run_is_the_same_run(
    request_: dict[str, Any], execution: str, order: tuple[int, ...], stop: int
) -> None:
    whole = made(execution=execution, **request_)
    file = io.BytesIO()
    train(*whole, range(stop))
    torch.save([part.state_dict() for part in whole], file)
    rest = train(*whole, range(stop, 21))
    resumed = made(seed=5, execution=execution, **request_)  # other weights, other patterns
    file.seek(0)
    states = torch.load(file, weights_only=True)
    for place in order:
        resumed[place].load_state_dict(states[place])
    assert train(*resumed, range(stop, 21)) == rest
    assert resumed[2].figures() == whole[2].figures()
    for (name, a), b in zip(whole[0].state_dict().items(), resumed[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for parameter, other in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        for entry, value in whole[1].state[parameter].items():
            assert torch.equal(value, resumed[1].state[other][entry]), entry


def test_a_checkpoint_of_another_recipe_or_model_is_refused() -> None:
    state = made()[2].state_dict()
    with pytest.raises(effcompile.UsageError, match=r"sparsity=0\.5"):
        made(sparsity=0.75)[2].load_state_dict(state)
    model = tiny(width=32)
    other = effcompile.DynamicSparsity(
        model, torch.optim.AdamW(model.parameters()), sparsity=0.5, block=4, updates=6, steps=21
    )
    with pytest.raises(effcompile.UsageError, match=r"another model: blocks\.0\.down"):
        other.load_state_dict(state)


def test_a_state_is_a_copy() -> None:
    run = made()
    state = run[2].state_dict()
    kept = {name: mask.clone() for name, mask in state["masks"].items()}
    train(*run, range(10))
    assert all(torch.equal(state["masks"][name], mask) for name, mask in kept.items())
    assert state["step"] == 0
