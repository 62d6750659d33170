"""Graph choices on the ONNX side: one rewrite per form, applied at exactly the planned sites.

Every rewrite is exact up to fp32 re-ordering. A rewrite returns True only where it changed the graph, so what
the backend reports as applied is what was done.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from effcompile.backends.onnxruntime.export import OnnxExport
from effcompile.ir.formats import Form
from effcompile.ir.program import Program


def apply_forms(exported: OnnxExport, program: Program) -> dict[str, Form]:
    """Rewrite attentions and norms as tagged; returns site → the form each now has."""
    nodes = {str(node.name): node for node in exported.model.graph}
    applied: dict[str, Form] = {}
    for site, name in exported.attentions.items():
        packed = program.word_at(site) == "packed" and pack_attention(exported.model.graph, nodes[name])
        causal = nodes[name].attributes.get("is_causal")
        applied[site] = Form(
            word="packed" if packed else "causal" if causal is not None and causal.as_int() else "sdpa"
        )
    for site, name in exported.norms.items():
        kept_apart = program.word_at(site) in ("", "split") and keep_norm_apart(
            exported.model.graph, nodes[name]
        )
        applied[site] = Form(word="split" if kept_apart else "fused")
    for site, name in exported.gelus.items():
        approximate = nodes[name].attributes.get("approximate")
        applied[site] = Form(
            word="tanh" if approximate is not None and approximate.as_string() == "tanh" else "erf"
        )
    ir.passes.common.RemoveUnusedNodesPass()(exported.model)
    return applied


def linears_as_matmul(exported: OnnxExport, quantised: Collection[str]) -> None:
    """Give every node that is to be quantised the only form that ORT's quantisers see: MatMul with a constant
    (K, N).

    They silently skip Gemm, and a weight behind a Transpose, which is how a large tied table is exported
    (facts: inference, 3.6).
    """
    graph = exported.model.graph
    planned = set(exported.linears.values()) & set(quantised)
    for node in list(graph):
        if node.name not in planned:
            continue
        if node.op_type == "Gemm" and _constant(node.inputs[1]) and is_plain_gemm(node):
            _split_gemm(graph, node)
        elif node.op_type == "MatMul" and (weight := behind_transpose(node.inputs[1])) is not None:
            node.replace_input_with(1, _transposed(graph, weight))
    for node in [
        node
        for node in graph
        if node.name in planned and node.op_type == "MatMul" and _constant(node.inputs[1])
    ]:
        if (weight := node.inputs[1]) is not None and weight.dtype == ir.DataType.DOUBLE:
            _in_single(graph, node, weight)
    ir.passes.common.RemoveUnusedNodesPass()(exported.model)


def weights_as_read(graph: ir.Graph) -> None:
    """Have weights that only one product reads, and that behind a Transpose, written as it reads them.

    ONNX Runtime would transpose them as it loads them, beside the weights as written and those as it packs
    them.
    """
    for node in [node for node in graph if node.op_type == "Transpose"]:
        weight, result = behind_transpose(node.outputs[0]), node.outputs[0]
        readers = [use.node for use in result.uses()]
        if (
            weight is None
            or weight.const_value is None
            or len(weight.const_value.shape) != 2
            or len(weight.uses()) != 1
        ):
            continue
        if len(readers) == 1 and readers[0].op_type == "MatMul" and not result.is_graph_output():
            readers[0].replace_input_with(1, _transposed(graph, weight))
            graph.remove(node, safe=True)
            del graph.initializers[str(weight.name)]


def _constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def behind_transpose(value: ir.Value | None) -> ir.Value | None:
    """The constant matrix whose transpose a value is; None for anything else."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Transpose" or not _constant(producer.inputs[0]):
        return None
    return producer.inputs[0]


def keep_norm_apart(graph: ir.Graph, norm: ir.Node) -> bool:
    """Add → LayerNormalization becomes Sum → LayerNormalization.

    ORT inserts its SkipLayerNormalization by itself wherever it sees Add before LayerNormalization, and on
    CPU that kernel is several times slower than the two it replaces. `Sum` of two tensors is the same sum and
    matches no pattern, so that the choice holds in any plain InferenceSession, without session options.
    """
    add = norm.inputs[0].producer() if norm.inputs[0] is not None else None
    if add is None or add.op_type != "Add":
        return add is not None and add.op_type == "Sum"
    replace(graph, add, ir.Node("", "Sum", list(add.inputs), num_outputs=1, name=add.name))
    return True


def pack_attention(graph: ir.Graph, attention: ir.Node) -> bool:
    """Attention on (B, H, S, D) with explicit transposes becomes Attention on (B, S, H·D), which
    needs none.
    """
    q, k, v = (_before_split_heads(value) for value in attention.inputs[:3])
    after = _merged_heads(attention)
    if q is None or k is None or v is None or after is None:
        return False
    *between, merged = after
    (q_value, heads), (k_value, kv_heads), (v_value, v_heads) = q, k, v
    if kv_heads != v_heads or len(attention.outputs) > 1:
        return False
    attributes = [a for a in attention.attributes.values() if a.name not in ("q_num_heads", "kv_num_heads")]
    packed = ir.Node(
        "",
        "Attention",
        [q_value, k_value, v_value, *attention.inputs[3:]],
        [*attributes, ir.AttrInt64("q_num_heads", heads), ir.AttrInt64("kv_num_heads", kv_heads)],
        num_outputs=1,
        name=attention.name,
    )
    packed.metadata_props.update(attention.metadata_props)
    _copy_type(attention.outputs[0], packed.outputs[0], with_shape=False)
    packed.outputs[0].name = f"{attention.outputs[0].name}_packed"
    graph.insert_before(attention, packed)
    ir.convenience.replace_all_uses_with(merged.outputs[0], packed.outputs[0])
    graph.remove([merged, *reversed(between), attention], safe=True)
    return True


def _before_split_heads(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """(x_BSE, heads) where value = Transpose(Reshape(x_BSE → B S H D), 0 2 1 3); else None."""
    transpose = value.producer() if value is not None else None
    if transpose is None or transpose.op_type != "Transpose" or not _swaps_heads(transpose):
        return None
    reshape = transpose.inputs[0].producer() if transpose.inputs[0] is not None else None
    if reshape is None or reshape.op_type != "Reshape":
        return None
    x, split = reshape.inputs[0], transpose.inputs[0]
    if (
        x is None
        or split is None
        or x.shape is None
        or split.shape is None
        or len(x.shape) != 3
        or len(split.shape) != 4
    ):
        return None
    heads, width, whole = split.shape[2], split.shape[3], x.shape[2]
    if not (isinstance(heads, int) and isinstance(width, int) and whole == heads * width):
        return None
    return x, heads


def _merged_heads(attention: ir.Node) -> list[ir.Node] | None:
    """The Transpose(0 2 1 3) after an attention, when only Reshapes that do not copy dimensions read it;
    before it the Reshapes to the same shape that lie between (Wav2Vec2 writes one).
    """
    path: list[ir.Node] = []
    node = attention
    while not path or _keeps_shape(node):
        users = [use.node for use in node.outputs[0].uses()]
        if len(users) != 1 or node.outputs[0].is_graph_output():
            return None
        node = users[0]
        path.append(node)
    if node.op_type != "Transpose" or not _swaps_heads(node):
        return None
    readers = [use.node for use in node.outputs[0].uses()]
    merges = bool(readers) and all(r.op_type == "Reshape" and not _copies_dims(r) for r in readers)
    return path if merges and not node.outputs[0].is_graph_output() else None


def _keeps_shape(node: ir.Node) -> bool:
    """True for a Reshape to the shape that its input is known to have."""
    if node.op_type != "Reshape" or node.inputs[0] is None:
        return False
    was, now = node.inputs[0].shape, node.outputs[0].shape
    known = was is not None and all(isinstance(dim, int) or dim.value is not None for dim in was)
    return known and was == now


def _swaps_heads(transpose: ir.Node) -> bool:
    perm = transpose.attributes.get("perm")
    return perm is not None and list(perm.as_ints()) == [0, 2, 1, 3]


def _copies_dims(reshape: ir.Node) -> bool:
    """True for a Reshape whose 0 entries refer to the input's own dimensions, which the rewrite changes."""
    target = reshape.inputs[1]
    constant = target.const_value if target is not None else None
    return constant is not None and 0 in np.asarray(constant.numpy()).ravel().tolist()


def is_plain_gemm(node: ir.Node) -> bool:
    """x W or x Wᵀ plus C, without factors."""

    def number(name: str, default: float) -> float:
        attribute = node.attributes.get(name)
        return float(attribute.value) if attribute is not None else default

    return number("alpha", 1.0) == 1.0 and number("beta", 1.0) == 1.0 and not number("transA", 0)


def _split_gemm(graph: ir.Graph, gemm: ir.Node) -> None:
    x, weight, *bias = gemm.inputs
    transposed = gemm.attributes.get("transB")
    if transposed is not None and transposed.as_int():
        weight = _transposed(graph, weight)
    matmul = ir.Node("", "MatMul", [x, weight], num_outputs=1, name=gemm.name)
    matmul.metadata_props.update(gemm.metadata_props)
    _copy_type(gemm.outputs[0], matmul.outputs[0])
    matmul.outputs[0].name = f"{gemm.outputs[0].name}_product"
    graph.insert_before(gemm, matmul)
    if bias and bias[0] is not None:
        replace(
            graph,
            gemm,
            ir.Node("", "Add", [matmul.outputs[0], bias[0]], num_outputs=1, name=f"{gemm.name}_bias"),
        )
    else:
        ir.convenience.replace_all_uses_with(gemm.outputs[0], matmul.outputs[0], replace_graph_outputs=True)
        graph.remove(gemm, safe=True)


def _in_single(graph: ir.Graph, matmul: ir.Node, weight: ir.Value) -> None:
    """Have a float64 product taken in float32 between casts: the kernels of quantised weights are given
    nothing else.
    """
    constant, name = weight.const_value, f"{weight.name}.single"
    assert constant is not None
    tensor = ir.tensor(constant.numpy().astype(np.float32), name=name)
    single = ir.Value(
        name=name, const_value=tensor, type=ir.TensorType(ir.DataType.FLOAT), shape=weight.shape
    )
    graph.register_initializer(graph.initializers.get(name, single))
    before = ir.node("Cast", [matmul.inputs[0]], {"to": ir.DataType.FLOAT}, name=f"{matmul.name}_in_single")
    product = ir.node("MatMul", [before.outputs[0], graph.initializers[name]], name=matmul.name)
    product.metadata_props.update(matmul.metadata_props)
    product.outputs[0].type, product.outputs[0].shape = (
        ir.TensorType(ir.DataType.FLOAT),
        matmul.outputs[0].shape,
    )
    product.outputs[0].name = f"{matmul.outputs[0].name}_single"
    graph.insert_before(matmul, [before, product])
    replace(
        graph,
        matmul,
        ir.node("Cast", product.outputs, {"to": ir.DataType.DOUBLE}, name=f"{matmul.name}_in_double"),
    )


def _transposed(graph: ir.Graph, weight: ir.Value | None) -> ir.Value:
    """A new initializer with the transpose of a constant matrix."""
    assert weight is not None
    assert weight.const_value is not None
    name = f"{weight.name}.transposed"
    if name not in graph.initializers:
        constant = weight.const_value
        shape = ir.Shape(constant.numpy().T.shape)
        made = lambda: ir.tensor(np.ascontiguousarray(constant.numpy().T), name=name)  # noqa: E731
        tensor = ir.LazyTensor(made, dtype=constant.dtype, shape=shape, name=name)  # made as it is written
        graph.register_initializer(ir.Value(name=name, const_value=tensor, type=weight.type, shape=shape))
    return graph.initializers[name]


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Put `new` where `old` was; the output keeps its name, type and shape, also as a graph output."""
    before, after = old.outputs[0], new.outputs[0]
    name = before.name
    _copy_type(before, after)
    new.metadata_props.update(old.metadata_props)
    graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove(old, safe=True)
    after.name = name


def _copy_type(source: ir.Value, target: ir.Value, *, with_shape: bool = True) -> None:
    target.type = source.type
    if with_shape:
        target.shape = source.shape
