"""Planned precision, applied to exactly the planned nodes. onnxruntime.quantization does the quantising; we
say where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from effcompile.backends.onnxruntime.unsigned import as_unsigned, products_saturate
from effcompile.core.errors import LoweringError
from effcompile.core.quiet import as_it_logs, quiet_libraries
from effcompile.ir.formats import (
    FP32,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_STATIC,
    NOT_FOUND,
    TABLE_INT8,
    W4,
    W8,
    Form,
    WeightFormat,
)

# node name → (lowest, highest) of its input on the calibration inputs
Ranges = Mapping[str, tuple[float, float]]

#: int8 accumulation in MatMulNBits; leaving it out costs 2x (facts: inference, 6).
_ACCURACY_LEVEL = 4
#: Families of formats, in the order in which their quantisers run.
FAMILIES = tuple(held.family for held in (INT8_DYNAMIC, INT8_CHANNEL, TABLE_INT8, INT8_STATIC, W8, W4))


def quantise(model: onnx.ModelProto, formats: Mapping[str, WeightFormat], ranges: Ranges) -> onnx.ModelProto:
    """Quantise MatMul and Gather nodes by name: node → format of its weight; fp32 nodes are left alone.

    Args:
        model: fp32 model below 2 GiB; consumed (the quantisers edit in place).
        formats: node name → format of a linear (MatMul) or table (Gather), of one of FAMILIES.
        ranges: input ranges of the int8_static nodes.

    Raises:
        LoweringError: a quantiser failed; says which.
    """
    order = {family: rank for rank, family in enumerate(FAMILIES)}
    for held in sorted(
        {held for held in formats.values() if held.family in order},
        key=lambda held: (order[held.family], held.group),
    ):
        nodes = [node for node, chosen in formats.items() if chosen == held]
        before = _tensor_names(model)
        try:
            model = _quantise_group(model, held, nodes, ranges)
        except Exception as error:
            raise LoweringError(
                f"onnxruntime.quantization failed at {held.name} ({len(nodes)} nodes): "
                f"{type(error).__name__}: {error}"
            ) from error
        _suffix_new_tensors(model, before, held.name)
    if products_saturate():
        as_unsigned(model)
    _make_node_names_unique(model)
    return model


def _tensor_names(model: onnx.ModelProto) -> set[str]:
    graph = model.graph
    made = {output for node in graph.node for output in node.output}
    return made | {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}


def _suffix_new_tensors(model: onnx.ModelProto, before: set[str], option: str) -> None:
    """Give what a quantiser added names of its own: the next one would give the same names to the same
    activations.
    """
    new = {name: f"{name}__{option}" for name in _tensor_names(model) - before if name}
    for node in model.graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name in new:
                    names[position] = new[name]
    for named in (*model.graph.initializer, *model.graph.value_info):
        named.name = new.get(named.name, named.name)


def _make_node_names_unique(model: onnx.ModelProto) -> None:
    taken: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if node.name in taken:
            node.name = f"{node.name}__{index}"
        taken.add(node.name)


def found_formats(model: onnx.ModelProto, nodes: Sequence[str]) -> dict[str, Form]:
    """What each node became, read from the quantised model itself: node name → form (fp32 where
    untouched).
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {output: node for node in model.graph.node for output in node.output}
    by_base: dict[str, list[onnx.NodeProto]] = {}
    wanted = set(nodes)
    for node in model.graph.node:
        base = _base_name(node.name)
        if base in wanted:
            by_base.setdefault(base, []).append(node)
    return {name: _read_form(by_base.get(name, []), weights, producers) for name in nodes}


def _quantise_group(
    model: onnx.ModelProto, held: WeightFormat, nodes: list[str], ranges: Ranges
) -> onnx.ModelProto:
    if held.group:
        return _weight_only(model, nodes, held)
    if held == INT8_STATIC:
        return _static(model, nodes, ranges)
    return _dynamic(
        model,
        nodes,
        per_channel=held.scale == "channel",
        op_type="Gather" if held == TABLE_INT8 else "MatMul",
    )


def _dynamic(model: onnx.ModelProto, nodes: list[str], *, per_channel: bool, op_type: str) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.quant_utils import QuantizationMode

    from effcompile.backends.onnxruntime.per_channel import WholeWeightQuantizer

    quantizer = WholeWeightQuantizer(
        _prepared(model),
        per_channel,
        False,  # reduce_range: 7-bit weights, for CPUs whose u8×s8 product saturates
        QuantizationMode.IntegerOps,
        False,  # static
        QuantType.QInt8,
        QuantType.QUInt8,
        None,  # tensors_range
        nodes,
        [],
        [op_type],
        {"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True},
    )
    return _run(quantizer)


def _static(model: onnx.ModelProto, nodes: list[str], ranges: Ranges) -> onnx.ModelProto:
    """QDQ on the inputs and weights of MatMuls; outputs stay fp32, so that ORT fuses MatMulIntegerToFloat."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import TensorData

    from effcompile.backends.onnxruntime.per_channel import WholeWeightQDQQuantizer

    inputs = {node.name: node.input[0] for node in model.graph.node if node.name in set(nodes)}
    bounds = {
        inputs[name]: TensorData(lowest=np.float32(ranges[name][0]), highest=np.float32(ranges[name][1]))
        for name in nodes
        if name in inputs
    }
    quantizer = WholeWeightQDQQuantizer(
        _prepared(model),
        True,  # per channel
        False,
        QuantType.QInt8,
        QuantType.QUInt8,
        bounds,
        nodes,
        [],
        ["MatMul"],
        {
            "DefaultTensorType": onnx.TensorProto.FLOAT,
            "WeightSymmetric": True,
            "ActivationSymmetric": False,
            "OpTypesToExcludeOutputQuantization": ["MatMul"],
            "DedicatedQDQPair": False,
        },
    )
    model = _run(quantizer)
    _unquantised_for_others(model, nodes)
    return _keep_bias_apart(model, nodes)


def _unquantised_for_others(model: onnx.ModelProto, nodes: list[str]) -> None:
    """Let only the planned nodes read quantised activations.

    The quantiser rewires every reader of a tensor, so that a residual sum beside a quantised linear lost
    precision too.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    planned = set(nodes)
    for node in model.graph.node:
        if node.name in planned or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for position, name in enumerate(node.input):
            dequantise = producers.get(name)
            quantise = (
                producers.get(dequantise.input[0])
                if dequantise is not None and dequantise.op_type == "DequantizeLinear"
                else None
            )
            if quantise is not None and quantise.op_type == "QuantizeLinear":
                node.input[position] = quantise.input[0]


def _keep_bias_apart(model: onnx.ModelProto, nodes: list[str]) -> onnx.ModelProto:
    """Add the bias with `Sum`: ORT turns 2-D MatMul + Add into Gemm first, which then stays fp32 behind
    DequantizeLinears.
    """
    products = {node.output[0] for node in model.graph.node if node.name in set(nodes)}
    for node in model.graph.node:
        if node.op_type == "Add" and products & set(node.input):
            node.op_type = "Sum"
    return model


def _weight_only(model: onnx.ModelProto, nodes: list[str], held: WeightFormat) -> onnx.ModelProto:
    with as_it_logs():  # the module configures logging
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            MatMulNBitsQuantizer,
        )

    config = DefaultWeightOnlyQuantConfig(
        block_size=held.group, is_symmetric=held.symmetric, accuracy_level=_ACCURACY_LEVEL, bits=held.bits
    )
    # `nodes_to_include` is ignored with an algo_config: every other product is excluded by name instead
    others = [
        node.name
        for node in model.graph.node
        if node.op_type in ("MatMul", "Gather") and node.name not in set(nodes)
    ]
    quantizer = MatMulNBitsQuantizer(model, nodes_to_exclude=others, algo_config=config)
    with quiet_libraries():  # they advise on the root logger about preprocessing that we have done otherwise
        quantizer.process()
    result: onnx.ModelProto = quantizer.model.model
    return result


def _prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Mark shapes as inferred (torch.onnx wrote them), or the quantiser saves and reloads the whole model to
    infer them.

    Those of weights are not said twice: the quantiser transposes the weight of a Gemm that stays in fp32, and
    not what was said of it.
    """
    from onnxruntime.quantization.quant_utils import add_infer_metadata

    weights = {tensor.name for tensor in model.graph.initializer}
    said = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(said)
    add_infer_metadata(model)
    return model


def _run(quantizer: Any) -> onnx.ModelProto:
    with quiet_libraries():  # they advise on the root logger about preprocessing that we have done otherwise
        quantizer.quantize_model()
    model: onnx.ModelProto = quantizer.model.model
    return model


def _base_name(name: str) -> str:
    for suffix in ("_quant", "_Q4", "_Q8", "_Q2", "_MatMul"):  # the last from a Gemm that the quantiser split
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _read_form(
    found: list[onnx.NodeProto],
    weights: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> Form:
    for node in found:
        if (held := _read_format(node, weights, producers)) is not None:
            return Form(weights=held)
    return Form(weights=FP32) if found else NOT_FOUND


def _read_format(
    node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], producers: Mapping[str, onnx.NodeProto]
) -> WeightFormat | None:
    """What one product or lookup holds; None for any other node."""
    if node.op_type == "MatMulInteger":
        return _dynamic_format(node, weights)
    if node.op_type == "MatMulNBits":
        figures = {a.name: int(a.i) for a in node.attribute}
        zeros = len(node.input) > 3 and bool(node.input[3])
        return replace(
            W4 if figures["bits"] == 4 else W8,
            bits=figures["bits"],
            group=figures["block_size"],
            symmetric=not zeros,
        )
    if node.op_type == "Gather" and node.input[0] in weights:
        return FP32 if weights[node.input[0]].data_type == onnx.TensorProto.FLOAT else TABLE_INT8
    if node.op_type == "MatMul":
        sources = [producers.get(name) for name in node.input[:2]]
        return (
            INT8_STATIC if all(s is not None and s.op_type == "DequantizeLinear" for s in sources) else FP32
        )
    return None


def _dynamic_format(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> WeightFormat:
    """Per tensor or per channel, by the number of the weight's zero points."""
    zero_point = weights.get(node.input[3]) if len(node.input) > 3 else None
    count = int(np.prod(numpy_helper.to_array(zero_point).shape)) if zero_point is not None else 1
    return INT8_CHANNEL if count > 1 else INT8_DYNAMIC
