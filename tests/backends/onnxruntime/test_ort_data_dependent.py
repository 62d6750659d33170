"""A scalar that tracing cannot know (`.item()`) must not keep the rest of the model from being lowered."""

from __future__ import annotations

import torch
from torch import nn

from effcompile.backends.onnxruntime.backend import OnnxRuntime
from effcompile.capture import capture, verify_capture
from effcompile.ir.formats import FP32, Form


class Scaled(nn.Module):
    """As DeBERTa's relative positions: a bound is made a tensor and read back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        span = (10 - torch.tensor(x.shape[1])).item()
        return self.second(torch.relu(self.first(x)) * span)


def test_both_linears_are_found_after_the_scalar() -> None:
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(1, 4, 8)
    program = capture(model, (x,))
    assert all(check.passed for check in verify_capture(program, model))
    lowered = OnnxRuntime().lower(program, None, [])
    assert lowered.applied == dict.fromkeys(("first", "second"), Form(weights=FP32))
    for given in (x, torch.randn(3, 7, 8)):
        with torch.no_grad():
            wanted = model(given)
        assert float((lowered(given)[0] - wanted).norm() / wanted.norm()) <= 1e-6
