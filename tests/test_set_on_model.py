"""An attribute that is set on what optimize returned is the model's: its answers follow, or are refused in
words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaled_net import Net, X
from torch import nn

import effcompile
from effcompile.core.errors import GuardError

MADE: dict[str, Callable[[nn.Module], Any]] = {
    "executable": lambda model: effcompile.optimize(
        model.eval(), inputs={"x": X}, backend="torch-eager", target="cpu-generic"
    ),
    "deferred": lambda model: effcompile.optimize(model.eval(), backend="torch-eager", target="cpu-generic"),
    "training": lambda model: effcompile.optimize(
        model, inputs={"x": X}, mode="training", passes=["no-pointwise"]
    ),
    "shapes": lambda model: effcompile.optimize(
        model, inputs={"x": X}, mode="training", shapes=[(4, 8)], passes=["no-pointwise"]
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_set_is_the_models(kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    made = MADE[kind](model)
    before = made(X).detach()
    torch.testing.assert_close(before, model(X).detach())
    made.scale = 3.0
    assert made.scale == 3.0
    if kind == "deferred":
        torch.testing.assert_close(made(X).detach(), before * 2.25)
    else:
        with pytest.raises(GuardError, match="scale"):
            made(X)
    made.scale = 2.0
    torch.testing.assert_close(made(X).detach(), before)
