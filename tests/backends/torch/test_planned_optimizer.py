"""An optimizer whose updates come within the backward, after its groups or its states were changed.

The oracle is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from effcompile.backends.torch.optimizer import PlannedOptimizer
from effcompile.core.errors import InputsError
from effcompile.ops.optimizers import StatesForm

Change = Callable[[Optimizer], None]
Made = Callable[[list[dict[str, Any]]], Optimizer]
NAMES = ("a", "b", "c")


def moved(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())


def group_of_its_own(optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[1]["params"].pop()], "lr": 0.7})


def read_back(optimizer: Optimizer) -> None:
    """Loading makes other groups."""
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.3


def other_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups = [dict(group, lr=0.5) for group in optimizer.param_groups]


def other_states(optimizer: Optimizer) -> None:
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = {
            name: torch.ones_like(value) if value.dim() else value for name, value in state.items()
        }


def gradients_that_are_there(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def scheduled(optimizer: Optimizer) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.1)


CHANGES: dict[str, Change] = {
    "moved to another group": moved,
    "a group of its own": group_of_its_own,
    "loaded, then another rate": read_back,
    "other groups": other_groups,
    "groups in another order": lambda optimizer: optimizer.param_groups.reverse(),
    "states cleared": lambda optimizer: optimizer.state.clear(),
    "other states": other_states,
    "a schedule": scheduled,
    "gradients that are there": gradients_that_are_there,
}
MADE: dict[str, Made] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(4, 3)) for name in NAMES}


def grouped(made: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [made["a"]], "lr": 0.1}, {"params": [made["b"], made["c"]], "lr": 0.2}]


def planned(kind: str, made: dict[str, nn.Parameter]) -> PlannedOptimizer:
    names = {id(parameter): name for name, parameter in made.items()}
    return PlannedOptimizer(MADE[kind](grouped(made)), StatesForm(), on_host=False, names=names)


def step(made: dict[str, nn.Parameter], optimizer: Optimizer, seed: int) -> None:
    """Gradients one by one, last first, as a backward makes them."""
    torch.manual_seed(seed)
    for name in reversed(NAMES):
        gradient = torch.randn(4, 3)
        if isinstance(optimizer, PlannedOptimizer):
            optimizer.consume(name, gradient)
        else:
            made[name].grad = gradient if made[name].grad is None else gradient + made[name].grad
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", CHANGES)
def test_groups_and_states_are_those_at_the_time(kind: str, name: str) -> None:
    found, wanted = parameters(), parameters()
    ours, own = planned(kind, found), MADE[kind](grouped(wanted))
    for seed in range(4):
        if seed == 2:
            CHANGES[name](ours)
            CHANGES[name](own)
        step(found, ours, seed)
        step(wanted, own, seed)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_parameter_that_was_taken_out_is_refused() -> None:
    """Its gradient would be kept for the user, and the backward has handed it on."""
    made = parameters()
    optimizer = planned("adamw", made)
    step(made, optimizer, 0)
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(InputsError, match="c is in none of the optimizer's groups"):
        step(made, optimizer, 1)
