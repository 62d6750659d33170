"""The emulated quantisers against the libraries that do the quantising."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnxruntime.capi import _pybind_state
from onnxruntime.quantization.quant_utils import quantize_data

from effcompile.estimate import fake_quant


def weights(seed: int, n: int = 6, k: int = 64) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * torch.rand(n, 1) * 3


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_weights_are_rounded_as_onnxruntime_does(seed: int) -> None:
    w = weights(seed)

    def theirs(w: torch.Tensor) -> torch.Tensor:
        _, scale, q = quantize_data(w.numpy(), onnx.TensorProto.INT8, symmetric=True)
        return torch.from_numpy(q.astype(np.float32) * scale.astype(np.float32))

    torch.testing.assert_close(fake_quant.per_tensor(w), theirs(w), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        fake_quant.per_channel(w), torch.stack([theirs(row) for row in w]), rtol=1e-5, atol=1e-6
    )
    assert torch.allclose(fake_quant.per_tensor(w, peak=float(w.abs().max())), fake_quant.per_tensor(w))


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_are_rounded_as_matmulnbits_does(bits: int) -> None:
    w, size = weights(1), 32
    n, k = w.shape
    packed = np.zeros((n, k // size, size * bits // 8), np.uint8)
    scales, zero = np.zeros(n * k // size, np.float32), np.zeros((n, -(-k // size * bits // 8)), np.uint8)
    getattr(_pybind_state, f"quantize_matmul_{bits}bits")(
        packed, w.T.numpy().copy(), scales, zero, size, n, k, True
    )
    q = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, k // size, size)
    theirs = (q.astype(np.float32) - 2 ** (bits - 1)) * scales.reshape(n, -1, 1)
    torch.testing.assert_close(
        fake_quant.grouped(w, bits, size), torch.from_numpy(theirs.reshape(n, k)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("offset", [-20.0, 0.0, 0.3, 20.0])
def test_activations_are_rounded_as_dynamic_quantize_linear_does(offset: float) -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)) + offset
    kinds = [("q", onnx.TensorProto.UINT8), ("s", onnx.TensorProto.FLOAT), ("z", onnx.TensorProto.UINT8)]
    graph = helper.make_graph(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    q, s, z = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x.numpy()}
    )
    theirs = torch.from_numpy((q.astype(np.float32) - float(z)) * s)
    assert float((fake_quant.uint8(x) - theirs).abs().max()) <= 1e-5 * max(1.0, abs(offset))


def test_values_outside_a_static_range_saturate_and_zeros_stay_zero() -> None:
    x = torch.tensor([-9.0, 0.0, 0.5, 9.0])
    assert fake_quant.uint8(x, (-1.0, 1.0)).tolist() == pytest.approx([-1.0, 0.0, 0.5, 1.0], abs=1 / 127)
    zeros = torch.zeros(2, 32)
    for made in (
        fake_quant.uint8(zeros),
        fake_quant.per_tensor(zeros),
        fake_quant.per_channel(zeros),
        fake_quant.grouped(zeros, 4, 32),
        fake_quant.block_int8(zeros, 32),
        fake_quant.bf16(zeros),
    ):
        assert torch.equal(made, zeros)
