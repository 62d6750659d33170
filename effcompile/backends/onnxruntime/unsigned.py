"""int8 weights held unsigned where ONNX Runtime's products of u8 activations and s8 weights are cut at 16
bits.

Processors without VNNI add two such products in 16 bits (vpmaddubsw): a linear of uniform weights is off by a
tenth. Of u8 by u8 they are added in 32 bits. w + 128 with the zero point 128 is the same weight to the bit,
at up to 1.3 times the seconds.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from effcompile.ir.formats import INT8_CHANNEL, INT8_DYNAMIC, INT8_STATIC

#: The formats whose products are of u8 by s8, and the setting of a plan that says how its artifact holds
#: their weights.
SIGNED = (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC)
INT8_WEIGHTS = "int8_weights"

#: Columns of the probe: enough for every kernel's inner loop.
_K = 128


@cache
def products_saturate() -> bool:
    """Whether they are, here: found by one product whose sums are the largest."""
    import onnxruntime

    x, y = (
        helper.make_tensor_value_info(name, kind, [16, _K])
        for name, kind in (("x", TensorProto.UINT8), ("y", TensorProto.INT32))
    )
    weight = numpy_helper.from_array(np.full((_K, _K), 127, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "probe", [x], [y], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"x": np.full((16, _K), 255, np.uint8)})
    return bool((made != 255 * 127 * _K).any())


def as_unsigned(model: onnx.ModelProto) -> None:
    """Hold the s8 weights of all products, and their zero points, as u8, in place; tables that are looked up
    stay.
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    read_by_products = {
        name for node in model.graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input[1:2]
    }
    made: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "MatMulInteger":
            places = 1, 3
        elif node.op_type == "DequantizeLinear" and node.output[0] in read_by_products:
            places = 0, 2
        else:
            continue
        if (weight := weights.get(node.input[places[0]])) is None or weight.data_type != TensorProto.INT8:
            continue
        for place in places:
            name = f"{node.input[place]}__u8"
            if name not in made:
                made.add(name)
                moved = numpy_helper.to_array(weights[node.input[place]]).astype(np.int16) + 128
                model.graph.initializer.append(numpy_helper.from_array(moved.astype(np.uint8), name))
            node.input[place] = name
    _without_unread(model, {name.removesuffix("__u8") for name in made})


def _without_unread(model: onnx.ModelProto, names: set[str]) -> None:
    """Drop those of these initializers that nothing reads any more."""
    read = {name for node in model.graph.node for name in node.input}
    for index in reversed(range(len(model.graph.initializer))):
        if (name := model.graph.initializer[index].name) in names and name not in read:
            del model.graph.initializer[index]
