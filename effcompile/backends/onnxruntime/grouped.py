"""Attention over a cache that stays where it is: `com.microsoft.GroupQueryAttention` in the place of
`Concat`, `Concat` and `Attention`.

It takes the past rows and writes the new ones behind them in the same buffer, where past and present are
one; heads that share keys read them as they are. Given two buffers it copies, as `Concat` does: a file with
it runs in any session. A cache's axis of rows has a name of its own in the model, the same for what enters
and leaves (`ROOM`), and by that it is found again (in_place.py).

    bias (B or 1, 1, S, T) = 0 where the mask is true, else the least number     seqlens_k (B) = T - 1

Source: onnxruntime/core/graph/contrib_ops/bert_defs.cc, contrib_ops/cpu/bert/group_query_attention.cc
(1.31). Behind a past it takes several new tokens of one row alone: rows of a batch are then given one by one,
each its part of the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from effcompile.backends.onnxruntime.export import OnnxExport
from effcompile.backends.onnxruntime.forms import replace
from effcompile.backends.onnxruntime.in_place import DOMAIN, GROUPED, ROOM
from effcompile.ir.program import Program
from effcompile.sites.attention.cached import CachedAttention, cached_attentions

_LEAST = float(np.finfo(np.float32).min)


def group_attentions(exported: OnnxExport, program: Program) -> int:
    """How many attentions over a cache of all tokens were rewritten: all that may be, or none.

    Nothing else may read a cache that enters but for its sizes.
    """
    graph = exported.model.graph
    nodes = {str(node.name): node for node in graph}
    inputs = {str(value.name): value for value in graph.inputs}
    pairs = [
        (each, nodes[name])
        for each in cached_attentions(program)
        if (name := exported.attentions.get(each.site)) is not None and _is_joined(nodes[name], each, inputs)
    ]
    if not pairs or not {"tokens", "mask"} <= inputs.keys():
        return 0
    made = _Made(graph, inputs["tokens"], inputs["mask"])
    for each, node in pairs:
        made.group(each, node)
    exported.model.opset_imports[DOMAIN] = 1
    ir.passes.common.RemoveUnusedNodesPass()(exported.model)
    return len(pairs)


def _is_joined(node: ir.Node, each: CachedAttention, inputs: Mapping[str, ir.Value]) -> bool:
    """Whether keys and values are past rows and new ones joined, and the results of the graph."""
    if node.op_type != "Attention" or len(node.inputs) != 4 or len(node.outputs) != 1:
        return False
    for value, name in zip(node.inputs[1:3], (each.key, each.value), strict=True):
        joined = value.producer() if value is not None else None
        past = inputs.get(name)
        if joined is None or joined.op_type != "Concat" or past is None or len(joined.inputs) != 2:
            return False
        others = [use.node for use in past.uses() if use.node is not joined]
        readers = [use.node for use in joined.outputs[0].uses()]
        if (
            joined.inputs[0] is not past
            or not joined.outputs[0].is_graph_output()
            or readers != [node]
            or any(_size_of(other) is None for other in others)
        ):
            return False
    return True


def _size_of(node: ir.Node) -> int | None:
    """The axis whose size a node reads; None where it is no such node."""
    if node.op_type != "Shape":
        return None
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    first = start.as_int() if start is not None else 0
    return first if end is not None and end.as_int() == first + 1 else None


class _Made:
    """Puts the operator into a graph; what all of them read is made once."""

    def __init__(self, graph: ir.Graph, tokens: ir.Value, mask: ir.Value) -> None:
        self._graph = graph
        self._constants: dict[str, ir.Value] = {}
        self._biases: dict[str, ir.Value] = {}
        first = next(iter(graph))
        ends = {"start": 1, "end": 2}
        seen = self._add(first, "Shape", [mask], "grouped_all", ends)
        new = self._add(first, "Shape", [tokens], "grouped_new", ends)
        self._past = self._add(first, "Sub", [seen, new], "grouped_past")
        number = self._add(first, "Squeeze", [seen], "grouped_number")
        self._whole = self._add(first, "Cast", [number], "grouped_whole", {"to": ir.DataType.INT32})
        last = self._add(first, "Sub", [self._whole, self._constant(np.int32(1))], "grouped_last")
        rows = self._add(first, "Shape", [tokens], "grouped_rows", {"start": 0, "end": 1})
        self._lengths = self._add(first, "Expand", [last, rows], "grouped_lengths")

    def group(self, each: CachedAttention, node: ir.Node) -> None:
        """Replace an attention, and what joins its rows."""
        name, mask = str(node.name), node.inputs[3]
        joined = [one for value in node.inputs[1:3] if value is not None and (one := value.producer())]
        pasts = [one.inputs[0] for one in joined]
        heads = (node.inputs[0], *(one.inputs[1] for one in joined))
        named = zip(("q", "k", "v"), heads, strict=True)
        packed = [self._packed(value, node, f"{name}_{which}") for which, value in named]
        assert mask is not None
        inputs = [*packed, *pasts, self._lengths, self._whole, None, None, None, self._bias(mask, node)]
        scale = node.attributes.get("scale")
        made = ir.node(
            GROUPED,
            inputs,
            {
                "num_heads": each.heads,
                "kv_num_heads": each.groups,
                "scale": each.width**-0.5 if scale is None else scale.as_float(),
            },
            domain=DOMAIN,
            num_outputs=3,
            name=f"{name}_grouped",
        )
        made.outputs[0].name = f"{name}_packed"
        self._graph.insert_before(node, made)
        split = self._constant(np.array([0, 0, each.heads, each.width]))
        apart = self._add(node, "Reshape", [made.outputs[0], split], f"{name}_apart")
        back = ir.node("Transpose", [apart], {"perm": [0, 2, 1, 3]}, name=f"{name}_back")
        replace(self._graph, node, back)
        for one, present, past in zip(joined, made.outputs[1:], pasts, strict=True):
            assert past is not None
            self._sizes_of(past)
            before = one.outputs[0]
            present.name, present.type = str(before.name), before.type
            before.name = f"{before.name}_joined"
            ir.convenience.replace_all_uses_with(before, present, replace_graph_outputs=True)
            self._graph.remove(one, safe=True)
            sizes = list(past.shape or ())
            sizes[2] = ir.SymbolicDim(f"{ROOM}{past.name}")
            past.shape = present.shape = ir.Shape(sizes)

    def _sizes_of(self, past: ir.Value) -> None:
        """How many rows are past is what the tokens say: a buffer's size is what there is room for."""
        for use in list(past.uses()):
            if _size_of(use.node) == 2:
                ir.convenience.replace_all_uses_with(use.node.outputs[0], self._past)
                self._graph.remove(use.node, safe=True)

    def _bias(self, mask: ir.Value, node: ir.Node) -> ir.Value:
        """What is added to scores, made before the first attention that reads the mask."""
        name = f"{mask.name}_bias"
        if name not in self._biases:
            numbers = [self._constant(np.float32(0)), self._constant(np.float32(_LEAST))]
            self._biases[name] = self._add(node, "Where", [mask, *numbers], name)
        return self._biases[name]

    def _packed(self, value: ir.Value | None, node: ir.Node, name: str) -> ir.Value:
        """(B, S, H·D) of (B, H, S, D)."""
        by_row = self._add(node, "Transpose", [value], f"{name}_by_row", {"perm": [0, 2, 1, 3]})
        return self._add(node, "Reshape", [by_row, self._constant(np.array([0, 0, -1]))], f"{name}_packed")

    def _add(
        self, before: ir.Node, op: str, inputs: Sequence[ir.Value | None], name: str,
        attributes: Mapping[str, int | Sequence[int]] | None = None,
    ) -> ir.Value:  # fmt: skip
        made = ir.node(op, inputs, attributes, name=name)
        made.outputs[0].name = f"{name}_value"
        self._graph.insert_before(before, made)
        return made.outputs[0]

    def _constant(self, array: np.ndarray | np.generic) -> ir.Value:
        whole = np.asarray(array)
        name = f"grouped_{whole.dtype}_{'_'.join(map(str, whole.ravel().tolist()))}"
        if name not in self._constants:
            tensor = ir.tensor(whole, name=name)
            kind, sizes = ir.TensorType(tensor.dtype), ir.Shape(whole.shape)
            value = ir.Value(name=name, const_value=tensor, type=kind, shape=sizes)
            self._graph.register_initializer(value)
            self._constants[name] = value
        return self._constants[name]
