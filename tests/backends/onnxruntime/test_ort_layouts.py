"""An attention whose result is viewed, under a mask that is computed: torch.onnx's decomposition lays the
heads out otherwise.
"""

from __future__ import annotations

import torch
from torch import nn

from effcompile.backends.onnxruntime.backend import OnnxRuntime
from effcompile.capture import capture


class Biased(nn.Module):
    """As T5: position bias in the mask, heads merged by a reshape that is a view of what the fused kernel
    returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Embedding(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q, k, v = (part.view(batch, -1, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(rows)
        mask = self.bias((at[:, None] - at[None]).abs().clamp(max=7)).permute(2, 0, 1).unsqueeze(0)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return heads.transpose(1, 2).reshape(batch, rows, -1)


def test_merged_heads_of_a_biased_attention() -> None:
    torch.manual_seed(0)
    model, x = Biased().eval(), torch.randn(2, 6, 16)
    lowered = OnnxRuntime().lower(capture(model, (x,)), None, [])
    for given in (x, torch.randn(3, 9, 16)):
        with torch.no_grad():
            wanted = model(given)
        assert float((lowered(given)[0] - wanted).norm() / wanted.norm()) <= 1e-6
