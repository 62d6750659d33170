"""The critical batch against a loss whose gradients' mean and covariance are known, and what asks for it
wrongly.
"""

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.core.errors import InputsError


class Mean(nn.Module):
    """Its gradient by `weight` is the mean of the examples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.unread = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean()


def batches(count: int, size: int, width: int, mean: float, deviation: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [mean + deviation * torch.randn(size, width, generator=generator) for _ in range(count)]


def test_it_is_the_noise_over_the_signal_at_any_size_of_batch() -> None:
    for size in (4, 32):
        found = effcompile.critical_batch(Mean(64), batches(200, size, 64, mean=0.5, deviation=4.0))
        assert found.signal == pytest.approx(64 * 0.25, rel=0.15) and found.noise == pytest.approx(
            64 * 16.0, rel=0.05
        )
        assert (
            found.examples == pytest.approx(64.0, rel=0.2)
            and float(found) == found.examples
            and found.batches == 200
        )
    model = Mean(64)
    effcompile.critical_batch(model, batches(4, 8, 64, 1.0, 1.0), loss=lambda outputs, inputs: outputs)
    assert model.weight.grad is None and model.training


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(InputsError, match="two batches of one size"):
        effcompile.critical_batch(Mean(8), batches(1, 4, 8, 1.0, 1.0))
    with pytest.raises(InputsError, match=r"\[4, 8\] examples"):
        effcompile.critical_batch(Mean(8), [*batches(1, 4, 8, 1.0, 1.0), *batches(1, 8, 8, 1.0, 1.0)])
    up, down = torch.ones(4, 8), -torch.ones(4, 8)
    with pytest.raises(InputsError, match="Give more batches"):
        effcompile.critical_batch(Mean(8), [up, down])
