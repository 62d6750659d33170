"""Block-sparse linears on the ONNX side: planned ones become our operator, and are read again off the written
model.

The other way, ONNX Runtime on the pieces between the sparse products and these by torch
(benchmarks/_split_graph.py), was slower: two layers of BERT-base, 1×128, blocks of 16 at 0.9, one thread: 6.6
ms of CPU time against 4.7 (AMD EPYC, 2026-11-21, least of 80 in turn).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
import torch

from effcompile.backends.onnxruntime.custom_ops import BLOCK_SPARSE, DOMAIN, VERSION
from effcompile.backends.onnxruntime.export import OnnxExport
from effcompile.backends.onnxruntime.forms import behind_transpose, is_plain_gemm, replace
from effcompile.core.errors import UsageError
from effcompile.ir.formats import WeightFormat
from effcompile.sparse.forms import pattern_format
from effcompile.sparse.pattern import BlockPattern


def make_sparse(exported: OnnxExport, blocks: Mapping[str, int]) -> None:
    """Turn the named nodes, MatMul or Gemm with a constant weight, into BlockSparseLinear with blocks of that
    side.

    A node of another form is left as it is, and then found to be so.
    """
    if not blocks:
        return
    graph = exported.model.graph
    for node in list(graph):
        block = blocks.get(str(node.name))
        if block is not None and (weight := _weight(node)) is not None:
            _replace_product(graph, node, weight, block)
    ir.passes.common.RemoveUnusedNodesPass()(exported.model)
    if any(node.domain == DOMAIN for node in graph):
        exported.model.opset_imports[DOMAIN] = VERSION


def found_forms(model: ir.Model, nodes: Iterable[str]) -> dict[str, WeightFormat]:
    """Node → its sparse format, read from the pattern that it carries, for those that are block-sparse."""
    wanted = set(nodes)
    return {
        str(node.name): form
        for node in model.graph
        if node.name in wanted and (form := _form(node)) is not None
    }


def _form(node: ir.Node) -> WeightFormat | None:
    if (node.domain, node.op_type) != (DOMAIN, BLOCK_SPARSE):
        return None
    rows, cols, block = (node.attributes[name].as_int() for name in ("rows", "cols", "block"))
    crow, col = (_constant(value) for value in node.inputs[2:4])
    if crow is None or col is None:
        return None
    try:
        pattern = BlockPattern.from_indices(
            rows, cols, block, torch.from_numpy(crow.copy()), torch.from_numpy(col.copy())
        )
    except UsageError:
        return None
    return pattern_format(pattern.blocks(), block)


def _weight(node: ir.Node) -> np.ndarray | None:
    """The constant weight (N, K) of a product; None where it has none."""
    if node.op_type == "Gemm":
        if not is_plain_gemm(node):
            return None
        transposed = node.attributes.get("transB")
        stored = _constant(node.inputs[1])
        return stored if stored is None or (transposed is not None and transposed.as_int()) else stored.T
    if node.op_type != "MatMul":
        return None
    if (stored := _constant(node.inputs[1])) is not None:
        return stored.T
    return _constant(behind_transpose(node.inputs[1]))


def _constant(value: ir.Value | None) -> np.ndarray | None:
    return value.const_value.numpy() if value is not None and value.const_value is not None else None


def _replace_product(graph: ir.Graph, node: ir.Node, weight: np.ndarray, block: int) -> None:
    if weight.ndim != 2 or weight.dtype != np.float32:
        return
    rows, cols = weight.shape
    last, bias = _with_bias(node, rows)
    if node.op_type == "Gemm" and bias is None and len(node.inputs) > 2 and node.inputs[2] is not None:
        return  # what is added is no bias
    pattern, values = BlockPattern.from_dense(torch.from_numpy(np.ascontiguousarray(weight)), block)
    arrays = {"values": values.numpy(), "crow": pattern.crow.numpy(), "col": pattern.col.numpy()}
    inputs = [
        node.inputs[0],
        *(_initializer(graph, f"{node.name}.{name}", array) for name, array in arrays.items()),
    ]
    attributes = [ir.AttrInt64("rows", rows), ir.AttrInt64("cols", cols), ir.AttrInt64("block", block)]
    sparse = ir.Node(
        DOMAIN,
        BLOCK_SPARSE,
        [*inputs, *([bias] if bias is not None else [])],
        attributes,
        num_outputs=1,
        name=node.name,
    )
    replace(graph, last, sparse)
    if last is not node:
        graph.remove(node, safe=True)


def _with_bias(node: ir.Node, rows: int) -> tuple[ir.Node, ir.Value | None]:
    """(the node whose output is x Wᵀ + bias, the bias): the product itself, or the only Add that reads it."""
    if node.op_type == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return node, bias if _is_bias(bias, rows) else None
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or node.outputs[0].is_graph_output() or uses[0].node.op_type != "Add":
        return node, None
    other = uses[0].node.inputs[1 - uses[0].idx]
    return (uses[0].node, other) if _is_bias(other, rows) else (node, None)


def _is_bias(value: ir.Value | None, rows: int) -> bool:
    constant = _constant(value)
    return constant is not None and constant.shape == (rows,) and constant.dtype == np.float32


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(
        name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(list(array.shape))
    )
    graph.register_initializer(value)
    return value
