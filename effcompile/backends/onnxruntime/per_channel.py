"""onnxruntime.quantization's quantisers, with all channels of a weight at once instead of one after the other
in Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import onnx_quantizer
from onnxruntime.quantization.base_quantizer import QuantizationParams
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer, QDQQuantTensorType, QDQTensorQuantizedValue
from onnxruntime.quantization.quant_utils import (
    QuantizedValue,
    QuantizedValueType,
    add_dequant_output_suffix,
    add_dequant_suffix,
)

#: Symmetric int8 of ONNX Runtime: -127 to 127, so that a scale is the largest magnitude by 127.
_HIGHEST = 127


class WholeWeightQuantizer(ONNXQuantizer):  # type: ignore[misc]  # the library has no types
    """Gives to the bit what its base gives, in a fortieth of the time: BERT-base has 83,000 channels.

    The model has its shapes; what becomes a MatMul of a Gemm has those of its sum. (The base saves the whole
    model to infer them once more, and reads it again.)
    """

    def __init__(self, *given: Any) -> None:
        with _shapes_known():
            super().__init__(*given)

    def quantize_weight_per_channel_impl(
        self,
        weight_name: str,
        weight_qType: int,  # noqa: N803  # the base's name
        channel_axis: int,
        reduce_range: bool = True,
        keep_float_weight: bool = False,
    ) -> tuple[str, str, str]:
        symmetric = (
            weight_qType == onnx.TensorProto.INT8
            and self.is_weight_symmetric(weight_qType)
            and self.min_real_range is None
        )
        usual = (
            symmetric
            and not (self.reduce_range and reduce_range)
            and not keep_float_weight
            and not self.tensor_quant_overrides
        )
        values = _weight(self, weight_name) if usual else None
        if values is None:
            given = weight_name, weight_qType, channel_axis, reduce_range, keep_float_weight
            found: tuple[str, str, str] = super().quantize_weight_per_channel_impl(*given)
            return found
        whole, scale = quantised(values, channel_axis)
        names = f"{weight_name}_quantized", f"{weight_name}_zero_point", f"{weight_name}_scale"
        made: tuple[Any, ...] = whole, np.zeros(scale.shape, np.int8), scale
        self.model.initializer_extend(
            [numpy_helper.from_array(array, name) for array, name in zip(made, names, strict=True)]
        )
        return names


class WholeWeightQDQQuantizer(QDQQuantizer):  # type: ignore[misc]
    """Gives to the bit what its base gives for the weights of static quantisation."""

    tensors_to_quantize: dict[str, Any]

    def _calc_initializer_quant_params(self) -> dict[str, QuantizationParams]:
        tensors = self.tensors_to_quantize
        usual = (
            self.weight_qType == onnx.TensorProto.INT8
            and not self.reduce_range
            and self.min_real_range is None
        )
        apart = self.tensor_quant_overrides or self.add_qdq_pair_to_weight or getattr(self, "block_size", 0)
        by_channel = {
            name: values
            for name, info in tensors.items()
            if usual and not apart and info.tensor_type is QDQQuantTensorType.WEIGHT and info.axis is not None
            if (values := _weight(self, name)) is not None
            and values.size
            and -values.ndim <= info.axis < values.ndim
        }
        self._whole: dict[str, np.ndarray] = {}
        params: dict[str, QuantizationParams] = {}
        for name, values in by_channel.items():
            axis = tensors[name].axis % values.ndim
            self._whole[name], scale = quantised(values, axis)
            zeros = np.zeros(scale.shape, np.int8)
            params[name] = QuantizationParams(
                zero_point=zeros, scale=scale, quant_type=self.weight_qType, axis=axis
            )
        self.tensors_to_quantize = {name: info for name, info in tensors.items() if name not in params}
        params |= super()._calc_initializer_quant_params()
        self.tensors_to_quantize = tensors
        return {name: params[name] for name in tensors if name in params}

    def _add_qdq_nodes_for_initializer(self, weight_proto: onnx.TensorProto) -> None:
        name = weight_proto.name
        if name in self.quantized_value_map or name not in self._whole:
            super()._add_qdq_nodes_for_initializer(weight_proto)
            return
        params, output, whole = (
            self.initializer_quant_params[name],
            add_dequant_output_suffix(name),
            f"{name}_quantized",
        )
        made = self._make_scale_zp_initializers(name, params)
        self.model.replace_input_of_all_nodes(name, output)
        self.model.add_initializer(numpy_helper.from_array(self._whole.pop(name), whole))
        scale, zeros, axis = made.scale.name, made.zero_point.name, params["axis"]
        self._create_dq_node(whole, output, add_dequant_suffix(name), scale, zeros, axis=axis)
        value = QuantizedValue(name, whole, scale, zeros, QuantizedValueType.Initializer, axis=axis)
        self.quantized_value_map[name] = QDQTensorQuantizedValue(value, None, None)


@contextlib.contextmanager
def _shapes_known() -> Iterator[None]:
    infer = onnx_quantizer.save_and_reload_model_with_shape_infer
    onnx_quantizer.save_and_reload_model_with_shape_infer = lambda model: model
    try:
        yield
    finally:
        onnx_quantizer.save_and_reload_model_with_shape_infer = infer


def _weight(quantizer: Any, name: str) -> np.ndarray | None:
    """A weight that is quantised at once; None for what the library shall see to, and for what it shall fail
    at.
    """
    found = next((tensor for tensor in quantizer.model.initializer() if tensor.name == name), None)
    values: np.ndarray | None = None if found is None else numpy_helper.to_array(found)
    return values if values is not None and values.dtype == np.float32 and np.isfinite(values).all() else None


def quantised(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 of a weight along `axis`: (int8 values, one float32 scale for each channel).

    scale = 2 max|w| / 254 in float64, rounded to float32; 1 where that is no normal number; values are
    rounded half to even.
    """
    others = tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    exact = 2 * np.abs(weight).max(axis=others, initial=0.0).astype(np.float64) / (2 * _HIGHEST)
    scale = np.where(exact < np.finfo(np.float32).tiny, 1.0, exact).astype(np.float32)
    shaped = scale.reshape([-1 if i == axis % weight.ndim else 1 for i in range(weight.ndim)])
    return np.clip(np.round(weight / shaped), -128, _HIGHEST).astype(np.int8), scale
