"""Weights quantised at once are onnxruntime.quantization's, which quantises one channel after the other, to
the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, onnx_quantizer
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import QuantizationMode, add_infer_metadata

from effcompile.backends.onnxruntime.per_channel import WholeWeightQDQQuantizer, WholeWeightQuantizer


def product(weight: np.ndarray) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", None]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="p")],
        "g",
        [x],
        [y],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    add_infer_metadata(model)
    return model


PLAIN = {"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True}
STATIC = {
    "DefaultTensorType": onnx.TensorProto.FLOAT, "WeightSymmetric": True, "ActivationSymmetric": False,
    "OpTypesToExcludeOutputQuantization": ["MatMul"], "DedicatedQDQPair": False,
}  # fmt: skip


def made_by(kind: type[Any], weight: np.ndarray) -> onnx.ModelProto:
    """The model that a quantiser makes, dynamic or, of the QDQ kind, static."""
    types: tuple[Any, ...] = QuantType.QInt8, QuantType.QUInt8
    if issubclass(kind, QDQQuantizer):
        ranges = {"x": TensorData(lowest=np.float32(-1), highest=np.float32(2))}
        quantizer = kind(product(weight), True, False, *types, ranges, ["p"], [], ["MatMul"], STATIC)
    else:
        quantizer = kind(
            product(weight),
            True,
            False,
            QuantizationMode.IntegerOps,
            False,
            *types,
            None,
            ["p"],
            [],
            ["MatMul"],
            PLAIN,
        )
    quantizer.quantize_model()
    return quantizer.model.model


def quantised(kind: type[Any], weight: np.ndarray) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in made_by(kind, weight).graph.initializer}


@settings(max_examples=60, deadline=None)
@given(
    weight=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 4)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
        | st.floats(-2, 2, width=32)
        | st.sampled_from((0.0, 1e-40, 1e-38, 5e-37)),
    )
)
def test_as_the_library_channel_by_channel(weight: np.ndarray) -> None:
    assert (
        made_by(QDQQuantizer, weight).SerializeToString()
        == made_by(WholeWeightQDQQuantizer, weight).SerializeToString()
    )
    theirs, ours = quantised(ONNXQuantizer, weight), quantised(WholeWeightQuantizer, weight)
    assert theirs.keys() == ours.keys() and {"w_quantized", "w_scale", "w_zero_point"} <= ours.keys()
    for name, array in theirs.items():
        assert array.dtype == ours[name].dtype and np.array_equal(array, ours[name]), name


@pytest.mark.parametrize(
    "kinds", [(ONNXQuantizer, WholeWeightQuantizer), (QDQQuantizer, WholeWeightQDQQuantizer)]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_fails_as_the_library_does(
    bad: float, kinds: tuple[type[Any], ...]
) -> None:
    weight = np.ones((4, 3), np.float32)
    weight[1, 1] = bad
    outcomes = []
    for kind in kinds:
        try:
            outcomes.append(repr(quantised(kind, weight)))
        except Exception as error:
            outcomes.append(type(error).__name__)
    assert outcomes[0] == outcomes[1]


def test_a_large_weight_is_not_quantised_channel_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both of what is compared above would be the library's."""
    monkeypatch.setattr(ONNXQuantizer, "quantize_weight_per_channel_impl", None)
    monkeypatch.setattr("onnxruntime.quantization.qdq_quantizer.quantize_onnx_initializer", None)
    for kind in (WholeWeightQuantizer, WholeWeightQDQQuantizer):
        assert quantised(kind, np.ones((64, 32), np.float32))["w_quantized"].min() == 127


def test_the_model_is_not_written_to_have_its_shapes_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(model: onnx.ModelProto) -> onnx.ModelProto:
        raise AssertionError("440 MB of BERT-base, written and read")

    weight = np.ones((32, 8), np.float32)
    wanted = made_by(ONNXQuantizer, weight)
    monkeypatch.setattr(onnx_quantizer, "save_and_reload_model_with_shape_infer", saved)
    found = made_by(WholeWeightQuantizer, weight)
    assert [node.op_type for node in found.graph.node] == [node.op_type for node in wanted.graph.node]
    assert onnx_quantizer.save_and_reload_model_with_shape_infer is saved  # for others it is as it was
