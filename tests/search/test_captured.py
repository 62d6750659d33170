"""What is not the model is not planned for, and what to do is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import CaptureError


class MaskedWhereTraced(nn.Module):
    """Causal only where its input has no values, as Aimv2 is with a mask that keeps all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = type(x) is not torch.Tensor
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)


def test_a_model_that_is_another_one_while_it_is_traced() -> None:
    with pytest.raises(CaptureError, match=r"differs from the model on example.*set_attn_implementation"):
        effcompile.optimize(MaskedWhereTraced().eval(), (torch.randn(1, 2, 8, 4),))
