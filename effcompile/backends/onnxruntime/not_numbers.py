"""What ONNX Runtime computes otherwise than PyTorch where a value is infinite or NaN, spelled so that it is
the same.

Its Clip with one bound makes the largest finite number of an infinite one; its largest, smallest, arg-largest
and sorted values pass over NaN, which in PyTorch is the answer; its sign of NaN is NaN, in PyTorch 0. What is
left as it is: MaxPool passes over NaN, and has the least finite number for a window of −∞. Spelled otherwise
(a second pool, of marks), the stem of a ResNet took 1.3 to 1.8 times as long.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def as_in_torch(graph: ir.Graph) -> None:
    """Edits the graph, whose nodes have names."""
    makers = {
        "Clip": _bounded,
        "ReduceMax": _extreme,
        "ReduceMin": _extreme,
        "ArgMax": _place,
        "ArgMin": _place,
        "TopK": _sorted,
        "Sign": _sign,
    }
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        if node.domain == "" and node.op_type in makers and x is not None and x.dtype in _FLOATS:
            edit = _Edit(graph, node, x)
            made = makers[node.op_type](edit)
            if made:
                edit.finish(made)


class _Edit:
    """New nodes before one node, which they stand for in the end."""

    def __init__(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> None:
        self.graph, self.node, self.x, self.count = graph, node, x, 0

    def call(self, kind: str, *inputs: ir.Value | None, **attributes: int | ir.TensorProtocol) -> ir.Value:
        made = [
            ir.AttrTensor(k, v) if isinstance(v, ir.TensorProtocol) else ir.AttrInt64(k, v)
            for k, v in attributes.items()
        ]
        return self.put(ir.Node("", kind, inputs, made, num_outputs=1)).outputs[0]

    def put(self, node: ir.Node) -> ir.Node:
        self.count += 1
        node.name = f"{self.node.name}_as_in_torch_{self.count}"
        self.graph.insert_before(self.node, node)
        return node

    def again(self, *inputs: ir.Value | None) -> ir.Node:
        """The node itself, of other inputs."""
        return self.put(
            ir.Node(
                "",
                self.node.op_type,
                inputs,
                self.node.attributes.values(),
                num_outputs=len(self.node.outputs),
            )
        )

    def constant(self, value: float | list[int]) -> ir.Value:
        assert self.x.dtype is not None
        dtype = np.dtype(np.int64) if isinstance(value, list) else self.x.dtype.numpy()
        return self.call("Constant", value=ir.tensor(np.array(value, dtype)))

    def marks(self) -> ir.Value:
        """1 where x is NaN, else 0, in x's dtype."""
        assert self.x.dtype is not None
        return self.call("Cast", self.call("IsNaN", self.x), to=int(self.x.dtype))

    def finish(self, values: tuple[ir.Value, ...]) -> None:
        for old, new in zip(self.node.outputs, values, strict=True):
            name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = f"{name}_before", name
        self.graph.remove(self.node, safe=True)


def _bounded(edit: _Edit) -> tuple[ir.Value, ...]:
    lowest, highest = [*edit.node.inputs[1:], None, None][:2]
    if (lowest is None) == (highest is None):
        return ()
    return (edit.call("Max", edit.x, lowest) if highest is None else edit.call("Min", edit.x, highest),)


def _extreme(edit: _Edit) -> tuple[ir.Value, ...]:
    """NaN where one of those that are compared is."""
    others = edit.node.inputs[1:]
    there = ir.Node("", "ReduceMax", [edit.marks(), *others], edit.node.attributes.values(), num_outputs=1)
    some = edit.call("Cast", edit.put(there).outputs[0], to=int(ir.DataType.BOOL))
    return (edit.call("Where", some, edit.constant(float("nan")), edit.again(edit.x, *others).outputs[0]),)


def _sign(edit: _Edit) -> tuple[ir.Value, ...]:
    return (
        edit.call("Where", edit.call("IsNaN", edit.x), edit.constant(0.0), edit.again(edit.x).outputs[0]),
    )


def _place(edit: _Edit) -> tuple[ir.Value, ...]:
    """Where there is a NaN, that of the first one: its mark is the largest, or the smallest, then."""
    axis, marks = edit.node.attributes.get_int("axis", 0), edit.marks()
    some = edit.call(
        "Cast", edit.call("ReduceMax", marks, edit.constant([axis]), keepdims=1), to=int(ir.DataType.BOOL)
    )
    marks = marks if edit.node.op_type == "ArgMax" else edit.call("Neg", marks)
    return (edit.again(edit.call("Where", some, marks, edit.x)).outputs[0],)


def _sorted(edit: _Edit) -> tuple[ir.Value, ...]:
    """NaN is the largest of all, beside infinity."""
    compared = edit.call("Where", edit.call("IsNaN", edit.x), edit.constant(float("inf")), edit.x)
    places = edit.again(compared, edit.node.inputs[1]).outputs[1]
    return edit.call("GatherElements", edit.x, places, axis=edit.node.attributes.get_int("axis", -1)), places
