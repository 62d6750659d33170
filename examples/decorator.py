"""The decorator: declare the goal where the model is written; it is planned and lowered at the first call.

python examples/decorator.py
"""

import torch
from torch import nn

import effcompile

torch.manual_seed(0)
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True),
    num_layers=2,
    enable_nested_tensor=False,
).eval()


@effcompile.optimize(max_error=0.05)
def embed(x: torch.Tensor) -> torch.Tensor:
    return encoder(x).mean(dim=1)


if __name__ == "__main__":
    x = torch.randn(4, 16, 64)
    with torch.no_grad():
        before, after = encoder(x).mean(dim=1), embed(x)
    embed.report()
    print(f"relative error {float((after - before).norm() / before.norm()):.1e}")
