"""GroupNorm behind a view of a transposed tensor: the tracer's strides of an axis of size 1 are not those at
run time.
"""

import pytest
import torch
from torch import nn

import effcompile


class Tokens(nn.Module):
    """The middle of an autoencoder: what attention gives back as an image, and a norm over it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.conv(self.norm(tokens + self.conv(x))).square().mean()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_with_group_norm_of_a_transposed_view_is_the_models(batch: int) -> None:
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(batch, 8, 4, 4)
    loss = model(x)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    planned = effcompile.optimize(model, (x,), mode="training")
    found = planned(x)
    found.backward()
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(wanted))


@pytest.mark.parametrize("backend", ["torch-eager", "onnxruntime"])
def test_a_call_of_it_too(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(1, 8, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            effcompile.optimize(model, (x,), backend=backend)(x), model(x), rtol=1e-4, atol=1e-5
        )
