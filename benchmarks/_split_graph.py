"""A model with our block-sparse operators run without them: ONNX Runtime on the pieces between, the products
by our torch operator.

What the ONNX Runtime backend would ship if it had no operator library; here to be timed against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from effcompile.backends.onnxruntime.custom_ops import BLOCK_SPARSE, DOMAIN
from effcompile.backends.onnxruntime.session import Settings, open_session
from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.sparse.pattern import BlockPattern

Step = Callable[[dict[str, np.ndarray]], None]


def split(path: Path, threads: int) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    """The saved model as a callable on named arrays.

    A piece is what can run between two rounds of sparse products.
    """
    model = onnx.load(path)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    levels = _levels(model)
    steps: list[Step] = []
    for level in range(max(levels) + 1):
        nodes = [node for node, at in zip(model.graph.node, levels, strict=True) if at == level]
        dense = [node for node in nodes if not _is_sparse(node)]
        if dense:
            steps.append(_session(model, dense, threads))
        steps += [_product(node, constants) for node in nodes if _is_sparse(node)]

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        known = dict(feeds)
        for step in steps:
            step(known)
        return [known[output.name] for output in model.graph.output]

    return run


def _is_sparse(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, BLOCK_SPARSE)


def _levels(model: onnx.ModelProto) -> list[int]:
    """For each node the most sparse products before it on any path; its nodes stand in topological order."""
    made: dict[str, int] = {}
    levels = []
    for node in model.graph.node:
        level = max((made.get(name, 0) for name in node.input), default=0)
        made.update(dict.fromkeys(node.output, level + _is_sparse(node)))
        levels.append(level)
    return levels


def _session(model: onnx.ModelProto, nodes: list[onnx.NodeProto], threads: int) -> Step:
    """These nodes as a session: what they read from others comes in, what others read goes out."""
    graph = model.graph
    made = {name for node in nodes for name in node.output}
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    ours = {id(node) for node in nodes}
    elsewhere = {name for node in graph.node if id(node) not in ours for name in node.input} | {
        output.name for output in graph.output
    }
    constants = [tensor for tensor in graph.initializer if tensor.name in read]
    known = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    inputs = [
        known[name] for name in read if name not in made and name not in {tensor.name for tensor in constants}
    ]
    outputs = [known[name] for node in nodes for name in node.output if name in elsewhere]
    opsets = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    made_graph = helper.make_graph(nodes, "piece", inputs, outputs, constants)
    piece = helper.make_model(made_graph, opset_imports=opsets, ir_version=model.ir_version)
    # dozens of pools must not spin at once
    session = open_session(piece.SerializeToString(), Settings(threads=threads, spinning=False))
    names_in, names_out = [value.name for value in session.get_inputs()], [value.name for value in outputs]

    def step(values: dict[str, np.ndarray]) -> None:
        values.update(
            zip(names_out, session.run(names_out, {name: values[name] for name in names_in}), strict=True)
        )

    return step


def _product(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Step:
    values, crow, col, *bias = (
        torch.from_numpy(numpy_helper.to_array(constants[name]).copy()) for name in node.input[1:]
    )
    sizes: dict[str, Any] = {attribute.name: attribute.i for attribute in node.attribute}
    pattern = BlockPattern.from_indices(sizes["rows"], sizes["cols"], sizes["block"], crow, col)
    added = bias[0] if bias else None

    def step(known: dict[str, np.ndarray]) -> None:
        x = torch.from_numpy(known[node.input[0]])
        known[node.output[0]] = block_sparse_linear(x, values, *pattern.indices, added).numpy()

    return step
