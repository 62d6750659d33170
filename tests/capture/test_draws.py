"""Random numbers of a planned step are eager's under the same seed, also where a tensor is a permuted view or
a module is used twice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import effcompile


class Permuted(nn.Module):
    """Draws on the permuted result of a norm."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.draw = nn.Linear(16, 16), nn.GroupNorm(4, 16), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x).permute(0, 2, 1)).permute(0, 2, 1)
        return self.draw(h).square().mean()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(16)


class Block(nn.Module):
    def __init__(self, noise: nn.Module) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(16, 16), noise

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(self.noise(x)), 0.3, self.training)


class Twice(nn.Module):
    """One module that draws without reading anything, used in every block, and once more behind them all."""

    def __init__(self) -> None:
        super().__init__()
        noise = Noise()
        self.layers = nn.ModuleList(Block(noise) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layers[0].noise(x).square().mean()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.2, training=True),
    "dropout": lambda h: F.dropout(h, 0.2, training=True),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(0.4),
    "bernoulli": lambda h: h * torch.bernoulli(torch.empty_like(h), 0.4),
    "bernoulli of probabilities": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "uniform in place": lambda h: h + torch.empty_like(h).uniform_(),
    "like": lambda h: h + torch.randn_like(h),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_numbers_on_a_permuted_tensor_are_eagers(draw: Callable[[Tensor], Tensor]) -> None:
    _same_as_eager(Permuted(draw), torch.randn(2, 10, 16))


def test_a_module_used_twice_draws_in_its_turn() -> None:
    _same_as_eager(Twice(), torch.randn(4, 16))


def _same_as_eager(model: nn.Module, x: Tensor) -> None:
    """Loss, gradients and what the generator gives next, over two steps."""
    planned = effcompile.optimize(model, inputs=x, mode="training")
    found, wanted = _steps(planned, x), _steps(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    seen = []
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(3)]
    return seen
