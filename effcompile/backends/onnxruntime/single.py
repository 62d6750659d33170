"""What ONNX Runtime has in float32 alone, in a float64 model: operators, between casts, where it would not
load the model, and the epsilon of an RMS norm.

What float32 rounds is some 1e-7 of the result, which verification measures.
"""

from __future__ import annotations

import onnx_ir as ir

#: Without a kernel for float64 on CPUs (`get_all_opkernel_def()` of 1.31), and without a function body that
#: has none but others. Those whose result float32 could choose otherwise (NonZero, Hardmax) are left out.
IN_SINGLE = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "AveragePool", "Col2Im", "Conv", "ConvTranspose",
    "Cosh", "Det", "Erf", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
    "InstanceNormalization", "LRN", "LpPool", "Resize", "Sinh", "Tan",
})  # fmt: skip


def in_single(graph: ir.Graph) -> None:
    """Edits the graph, whose nodes have names."""
    for node in list(graph):
        if node.domain == "" and node.op_type in IN_SINGLE and any(map(_double, node.inputs)):
            _between_casts(graph, node)


def with_own_epsilon(graph: ir.Graph) -> None:
    """Edits the graph so that an RMS norm in float64 is not made one operator when a session loads it: ONNX
    Runtime (SimplifiedLayerNormFusion of 1.31) reads an epsilon of 32 or 16 bits, and takes 1e-5 otherwise.
    It knows the norm by its Pow(x, 2), which is x · x here.
    """
    for node in list(graph):
        if (
            node.domain == ""
            and node.op_type == "Pow"
            and _double(node.inputs[0])
            and _is_two(node.inputs[1])
        ):
            (square,), name = node.outputs, node.name
            x = node.inputs[0]
            product = ir.node("Mul", [x, x], name=f"{name}_squared")
            product.outputs[0].type, product.outputs[0].shape = square.type, square.shape
            graph.insert_before(node, [product])
            square.replace_all_uses_with(product.outputs[0], replace_graph_outputs=True)
            graph.remove(node, safe=True)
            product.outputs[0].name = square.name


def _is_two(exponent: ir.Value | None) -> bool:
    held = None if exponent is None else ir.convenience.get_const_tensor(exponent)
    return held is not None and held.size == 1 and float(held.numpy().reshape(-1)[0]) == 2.0


def _between_casts(graph: ir.Graph, node: ir.Node) -> None:
    for at, value in enumerate(node.inputs):
        if value is not None and _double(value):
            before = _cast(value, ir.DataType.FLOAT, f"{node.name}_in_single_{at}")
            graph.insert_before(node, [before])
            node.replace_input_with(at, before.outputs[0])
    for at, value in enumerate(node.outputs):
        if _double(value):
            after = _cast(value, ir.DataType.DOUBLE, f"{node.name}_in_double_{at}")
            graph.insert_after(node, [after])
            (back,), name = after.outputs, value.name
            value.replace_all_uses_with(back, replace_graph_outputs=True)
            after.replace_input_with(0, value)
            value.name, back.name = f"{name}_single", name
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    made = ir.node("Cast", [value], {"to": to}, name=name)
    made.outputs[0].type, made.outputs[0].shape = ir.TensorType(to), value.shape
    return made


def _double(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.DOUBLE
