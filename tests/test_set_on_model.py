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
from effcompile.core.errors import GuardError, UsageError

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


class Unread(nn.Module):
    """Has a property that cannot be read before it was set, as a LightningModule its `trainer`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._trainer = nn.Linear(4, 2), None

    @property
    def trainer(self) -> str:
        if self._trainer is None:
            raise RuntimeError("it is not attached to a Trainer")
        return self._trainer

    @trainer.setter
    def trainer(self, value: str) -> None:
        self._trainer = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_what_cannot_be_read_yet_is_set_on_the_model() -> None:
    model = Unread().eval()
    made = effcompile.optimize(model, backend="torch-eager", target="cpu-generic")
    made.trainer = "there"
    assert model.trainer == made.trainer == "there"


@pytest.mark.parametrize("inputs", [{}, {"inputs": torch.ones(2, 4)}], ids=["later", "at once"])
def test_a_module_that_a_trainer_trains_by_a_method_is_refused(inputs: dict[str, torch.Tensor]) -> None:
    class Lit(Unread):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.linear(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(
        UsageError, match=r"module\.linear = effcompile\.optimize\(module\.linear, mode='training'"
    ):
        effcompile.optimize(Lit(), mode="training", **inputs)
    assert isinstance(effcompile.optimize(Lit().eval(), backend="torch-eager"), nn.Module)
    del Lit.configure_optimizers  # whose loop is the user's own, and calls it
    assert isinstance(effcompile.optimize(Lit(), mode="training"), nn.Module)


class Encoder(nn.Sequential):
    """As sentence-transformers have it."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


@pytest.mark.parametrize("inputs", [{}, {"inputs": torch.ones(2, 4)}], ids=["later", "at once"])
def test_a_method_that_calls_the_modules_in_it_says_so(inputs: dict[str, torch.Tensor]) -> None:
    model = Encoder(nn.Linear(4, 2)).eval()
    made = effcompile.optimize(model, backend="torch-eager", target="cpu-generic", **inputs)
    with pytest.warns(UserWarning, match=r"runs the original Encoder: encode\(\) calls the modules in it"):
        assert torch.equal(made.encode(torch.ones(1, 4)), model[0](torch.ones(1, 4)))
