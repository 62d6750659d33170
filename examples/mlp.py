"""Any nn.Module will do. `model` and `inputs` may be objects or, as here, functions that make them.

effcompile optimize examples/mlp.py --max-error 0.02
"""

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().eval()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(32, 256, generator=torch.Generator().manual_seed(0)),)


def calibration() -> list[tuple[torch.Tensor, ...]]:
    """Inputs on which the cost in accuracy of each choice is measured; generated when a file has none."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(32, 256, generator=generator),) for _ in range(4)]
