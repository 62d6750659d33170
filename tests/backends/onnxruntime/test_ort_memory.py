"""What ONNX Runtime holds of a model, without what it holds of itself, and what is promised of it."""

from pathlib import Path

import pytest
import torch
from form_names import forms
from torch import nn

import effcompile
from effcompile.backends.base import Leaner
from effcompile.backends.onnxruntime import OnnxRuntime
from effcompile.capture import capture

pytestmark = [
    pytest.mark.usefixtures("exported_once"),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="read from Linux's /proc"),
]
MB = 1e6


def lowered(model, x):
    program = capture(model.eval(), (x,), {})
    tagged = program.tagged(forms({}), "test")
    return OnnxRuntime().lower(tagged, None, [tagged.flat_inputs()])


def test_what_onnx_runtime_holds_of_itself_is_no_memory_of_a_small_model():
    x = torch.randn(8, 64)
    found = lowered(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), x)
    assert found.weight_bytes < found.peak_bytes([x]) < 2 * MB, "its code alone is 8 MB"


def test_a_call_behind_the_first_is_measured_and_holds_less_where_that_is_asked_for():
    """Of 40 MB that the second call takes in one piece."""
    x = torch.randn(1024, 64)
    wide = [
        layer for _ in range(3) for layer in (nn.Linear(64, 4096 + 64), nn.GELU(), nn.Linear(4096 + 64, 64))
    ]
    found = lowered(nn.Sequential(*wide), x)
    as_it_is, answer = found.peak_bytes([x]), found(x)[0]
    assert isinstance(found, Leaner) and found.leaner() and not found.leaner()
    assert found.settings["pattern"] is False
    assert found.peak_bytes([x]) < as_it_is - 10 * MB
    torch.testing.assert_close(found(x)[0], answer)


def test_the_least_that_was_built_is_built_again_where_so_much_is_declared():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = (part.view(2, -1, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model, inputs = Attending().eval(), (torch.randn(2, 512, 64),)
    asked = {"inputs": inputs, "backend": "onnxruntime"}
    promised = effcompile.plan(model, inputs, backend="onnxruntime", minimize="memory").peak_bytes
    least = effcompile.optimize(model, **asked, minimize="memory").plan.measured.peak_bytes
    assert 0.7 * least < promised <= least
    declared = int(1.1 * least)
    assert effcompile.optimize(model, **asked, memory=declared).plan.measured.peak_bytes <= declared
