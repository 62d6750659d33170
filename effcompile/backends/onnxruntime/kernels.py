"""One kernel as a tiny ONNX model, timed the way the lowered model will run it.

A linear is repeated with different weights until they exceed the last-level cache, since in a real model each
layer's weights have been pushed out by the others before they are read again.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from effcompile.backends.onnxruntime.custom_ops import DOMAIN, VERSION, block_sparse_node, custom_ops_library
from effcompile.backends.onnxruntime.quantise import quantise
from effcompile.backends.onnxruntime.session import default_settings, open_session, run
from effcompile.core.errors import LoweringError
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.timing import SETTLED, median_seconds
from effcompile.ir.formats import (
    FP32,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_STATIC,
    LINEAR_FORMATS,
    TABLE_INT8,
    W4,
    W8,
    WeightFormat,
)
from effcompile.machine.cold import FEW_ROWS, MANY_ROWS, cold_copies, evict, reads_weights
from effcompile.machine.memory import give_back
from effcompile.machine.target import Dims, KernelCall
from effcompile.sparse.pattern import BlockPattern

if TYPE_CHECKING:
    import onnxruntime

_CACHE_BYTES = 48 * 2**20  # more than the last-level cache share of the machines we saw
_MOST_COPIES = 12
#: K and N of a linear that no cache feels.
_SMALL = (128, 64)
#: Numbers that are drawn for a tensor: what is multiplied does not change the time.
_DRAWN = 1 << 20
#: Bytes from which on the copies of a tensor begin with another one each: ONNX Runtime holds equal ones once,
#: and read 160 MB of them at 75 GB/s, where memory gives 25.
_OWN = 1 << 14
#: Bytes of a tensor above which it stands in a file of its own.
_LARGE = 1 << 20

_Built = tuple[onnx.ModelProto, dict[str, np.ndarray], int]  # model, feeds, kernels per run


def measure(call: KernelCall) -> float | None:
    """Seconds of one kernel, or None where ONNX Runtime has no such kernel on CPU.

    Raises:
        LoweringError: why ours for block-sparse linears cannot be had here.
    """
    builder = _BUILDERS.get(call.kernel)
    if builder is None:
        return None
    if call.kernel == "linear/sparse":
        custom_ops_library()
    try:
        with contextlib.ExitStack() as stack:
            session, feeds, copies = stack.enter_context(_opened(builder, call.dims))
            emptied = stack.enter_context(_emptied(builder, call)) if reads_weights(call) else None
            timed = partial(run, session, feeds)
            return median_seconds(timed, min_rounds=5, budget=0.08, settled=SETTLED, before=emptied) / copies
    except LoweringError:
        return None
    finally:
        give_back()  # a vocabulary's weights


@contextlib.contextmanager
def _emptied(builder: Callable[[Dims], _Built], call: KernelCall) -> Iterator[Callable[[], None]]:
    """What empties the caches before a run: of weights alone, for a small kernel of the kind brings back the
    program's code and what it works with.
    """
    m, _, _, *group = call.dims
    with _opened(builder, (m, *_SMALL, *group)) as (session, feeds, _):

        def emptied() -> None:
            evict()
            run(session, feeds)

        yield emptied


@contextlib.contextmanager
def _opened(
    builder: Callable[[Dims], _Built], dims: Dims
) -> Iterator[tuple[onnxruntime.InferenceSession, dict[str, np.ndarray], int]]:
    """A session of the kernels, their inputs, and how many there are.

    Large weights go through a file, which ONNX Runtime maps: from bytes it would parse and copy them, beside
    the model they are in.
    """
    model, feeds, copies = builder(dims)
    with tempfile.TemporaryDirectory(prefix="effcompile-kernel-", ignore_cleanup_errors=True) as folder:
        # Windows keeps what is mapped
        path = Path(folder) / "kernel.onnx"
        onnx.save_model(model, path, save_as_external_data=True, location="weights", size_threshold=_LARGE)
        del model
        give_back()
        yield open_session(path, default_settings()), feeds, copies


def lacks(call: KernelCall) -> Reason | None:
    """See `backends.base.Backend.lacks`."""
    held = call.format
    if held is None or call.kernel in _BUILDERS:
        return None
    return Unsupported("ONNX Runtime on CPU has no {name}", (call.kernel.replace("/", " in "),))


def _linear(family: str) -> Callable[[Dims], _Built]:
    def build(dims: Dims) -> _Built:
        m, k, n = dims[:3]
        held = LINEAR_FORMATS[family].grouped_by(dims[-1])
        size = held.stored_bytes(n, k)
        copies = 1
        if m < MANY_ROWS:
            copies = cold_copies(size) if m <= FEW_ROWS else max(1, min(_MOST_COPIES, _CACHE_BYTES // size))
        x = _noise(m, k)
        one = _model(
            [
                helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
                helper.make_node("Add", ["p", "b"], ["y"]),
            ]
        )
        _constant(one, "w", _noise(k, n, scale=0.02))
        _constant(one, "b", _noise(n))
        _boundary(one, {"x": (m, k)}, {"y": (m, n)})
        one.graph.value_info.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, (m, n)))
        if held != FP32:
            if held.group and k % held.group:
                raise LoweringError(f"K = {k} is not a multiple of the group size {held.group}")
            one = quantise(one, {"product": held}, {"product": (float(x.min()), float(x.max()))})
        return _repeated(one, copies), dict.fromkeys(_inputs(copies), x), copies

    return build


def _sparse(dims: Dims) -> _Built:
    """Blocks at random places."""
    m, k, n, kept, block = dims
    blocks = (n // block) * (k // block)
    if n % block or k % block or not 0 < kept <= blocks:
        raise LoweringError(f"a weight ({n}, {k}) has no {kept} blocks of {block}")
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(blocks) < kept)
    pattern = BlockPattern.from_blocks(chosen.view(n // block, -1), block)
    constants = {
        "v": _noise(kept, block, block),
        "crow": pattern.crow.numpy(),
        "col": pattern.col.numpy(),
        "b": _noise(n),
    }
    model = _model([block_sparse_node(["x", *constants], "y", rows=n, cols=k, block=block, name="product")])
    model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    for name, array in constants.items():
        _constant(model, name, array)
    _boundary(model, {"x": (m, k)}, {"y": (m, n)})
    copies = max(1, min(_MOST_COPIES, int(_CACHE_BYTES / (4 * kept * block**2))))
    return _repeated(model, copies), dict.fromkeys(_inputs(copies), _noise(m, k)), copies


def _inputs(copies: int) -> list[str]:
    """Names of the inputs of so many copies of what reads x."""
    return [f"x.{copy}" for copy in range(copies)] if copies > 1 else ["x"]


def _repeated(model: onnx.ModelProto, copies: int) -> onnx.ModelProto:
    """The model `copies` times side by side, each with an input and weights of its own; itself for one, whose
    weights are large.

    Of one input for all ONNX Runtime makes codes once, and then multiplies by other kernels than those of a
    linear that alone reads its input: int8_dynamic at 64 × 512 × 2048 took 292 µs so, and 240 in a model,
    int8_channel 251 and 256.
    """
    if copies == 1:
        return model
    nodes, tensors = list[onnx.NodeProto](), list[onnx.TensorProto]()
    inputs, outputs = list[onnx.ValueInfoProto](), list[onnx.ValueInfoProto]()
    own = {each.name for each in (*model.graph.initializer, *model.graph.input)}
    own |= {output for node in model.graph.node for output in node.output}
    for copy in range(copies):

        def rename(name: str, copy: int = copy) -> str:
            return f"{name}.{copy}" if name in own else name

        for node in model.graph.node:
            twin = onnx.NodeProto()
            twin.CopyFrom(node)
            twin.name = f"{node.name}.{copy}"
            twin.input[:] = [rename(i) for i in node.input]
            twin.output[:] = [rename(o) for o in node.output]
            nodes.append(twin)
        for tensor in model.graph.initializer:
            same = onnx.TensorProto()
            same.CopyFrom(tensor)
            same.name = rename(tensor.name)
            if len(same.raw_data) >= _OWN:
                same.raw_data = copy.to_bytes(1, "little") + same.raw_data[1:]
            tensors.append(same)
        for each, to in ((model.graph.input, inputs), (model.graph.output, outputs)):
            for given in each:
                value = onnx.ValueInfoProto()
                value.CopyFrom(given)
                value.name = rename(given.name)
                to.append(value)
    graph = helper.make_graph(nodes, "kernel", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def _attention(packed: bool = False, causal: bool = False) -> Callable[[Dims], _Built]:
    """With a dense mask, or causal without one."""

    def build(dims: Dims) -> _Built:
        b, h, sq, sk, d = dims[:5]
        feeds = {"q": _noise(b, sq, h * d), "k": _noise(b, sk, h * d), "v": _noise(b, sk, h * d)}
        if not causal:
            feeds["mask"] = np.ones((b, 1, sq, sk), bool)
        nodes = _packed_nodes(h) if packed else _split_nodes(causal)
        model = _model(nodes)
        if not packed:
            model.graph.initializer.extend([_shape("heads", [0, 0, h, d]), _shape("merged", [0, 0, h * d])])
        _boundary(
            model,
            {name: array.shape for name, array in feeds.items()},
            {"y": (b, sq, h * d)},
            {"mask": TensorProto.BOOL},
        )
        return model, feeds, 1

    return build


def _packed_nodes(heads: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], q_num_heads=heads, kv_num_heads=heads)
    ]


def _split_nodes(causal: bool) -> list[onnx.NodeProto]:
    nodes = []
    for name in "qkv":
        nodes.append(helper.make_node("Reshape", [name, "heads"], [f"{name}4"]))
        nodes.append(helper.make_node("Transpose", [f"{name}4"], [f"{name}t"], perm=[0, 2, 1, 3]))
    nodes.append(
        helper.make_node(
            "Attention", ["qt", "kt", "vt", *([] if causal else ["mask"])], ["a"], is_causal=int(causal)
        )
    )
    nodes.append(helper.make_node("Transpose", ["a"], ["at"], perm=[0, 2, 1, 3]))
    nodes.append(helper.make_node("Reshape", ["at", "merged"], ["y"]))
    return nodes


def _norm(op: str, *, residual: str | None = None) -> Callable[[Dims], _Built]:
    def build(dims: Dims) -> _Built:
        rows, cols = dims
        nodes = [helper.make_node(residual, ["x", "r"], ["s"])] if residual else []
        weights = ["w", "b"] if op == "LayerNormalization" else ["w"]
        nodes.append(helper.make_node(op, ["s" if residual else "x", *weights], ["y"], axis=-1))
        model = _model(nodes)
        model.graph.initializer.extend(numpy_helper.from_array(_noise(cols), name) for name in weights)
        feeds = {name: _noise(1, rows, cols) for name in (("x", "r") if residual else ("x",))}
        _boundary(model, dict.fromkeys(feeds, (1, rows, cols)), {"y": (1, rows, cols)})
        return model, feeds, 1

    return build


def _unary(op: str, **attributes: Any) -> Callable[[Dims], _Built]:
    def build(dims: Dims) -> _Built:
        model = _model([helper.make_node(op, ["x"], ["y"], **attributes)])
        _boundary(model, {"x": dims}, {"y": dims})
        return model, {"x": _noise(*dims)}, 1

    return build


def _pointwise(dims: Dims) -> _Built:
    model = _model([helper.make_node("Mul", ["x", "x"], ["y"])])
    _boundary(model, {"x": dims}, {"y": dims})
    return model, {"x": _noise(*dims)}, 1


def _matmul(dims: Dims) -> _Built:
    b, m, k, n = dims
    model = _model([helper.make_node("MatMul", ["x", "w"], ["y"])])
    _boundary(model, {"x": (b, m, k), "w": (b, k, n)}, {"y": (b, m, n)})
    return model, {"x": _noise(b, m, k), "w": _noise(b, k, n)}, 1


def _embedding(held: WeightFormat) -> Callable[[Dims], _Built]:
    def build(dims: Dims) -> _Built:
        rows, cols = dims
        ids = np.random.default_rng(0).integers(0, 4096, rows)
        model = _model([helper.make_node("Gather", ["table", "ids"], ["y"], name="lookup")])
        _constant(model, "table", _noise(4096, cols))
        _boundary(model, {"ids": (rows,)}, {"y": (rows, cols)}, {"ids": TensorProto.INT64})
        if held != FP32:
            model = quantise(model, {"lookup": held}, {})
        return model, {"ids": ids}, 1

    return build


_BUILDERS: dict[str, Callable[[Dims], _Built]] = {
    **{
        f"linear/{held.family}": _linear(held.family)
        for held in (FP32, INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC, W8, W4)
    },
    "linear/sparse": _sparse,
    "matmul/fp32": _matmul,
    "attention/sdpa": _attention(),
    "attention/causal": _attention(causal=True),
    "attention/packed": _attention(packed=True),
    "norm/layer": _norm("LayerNormalization"),
    "norm/rms": _norm("RMSNormalization"),
    "add_norm/split": _norm("LayerNormalization", residual="Sum"),
    # ORT turns this into its SkipLayerNormalization
    "add_norm/fused": _norm("LayerNormalization", residual="Add"),
    "gelu/erf": _unary("Gelu"),
    "gelu/tanh": _unary("Gelu", approximate="tanh"),
    "embedding/fp32": _embedding(FP32),
    "embedding/int8": _embedding(TABLE_INT8),
    "pointwise/fp32": _pointwise,
    "softmax/fp32": _unary("Softmax", axis=-1),
}


def _model(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "kernel", [], [])
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )


def _boundary(
    model: onnx.ModelProto,
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    types: dict[str, int] | None = None,
) -> None:
    def info(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, (types or {}).get(name, TensorProto.FLOAT), shape)

    model.graph.input.extend(info(*item) for item in inputs.items())
    model.graph.output.extend(info(*item) for item in outputs.items())


def _constant(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    """Add an initializer, made where it stays: a tensor that is added to a graph is copied."""
    tensor = model.graph.initializer.add(
        name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype)
    )
    tensor.raw_data = array.tobytes()


def _shape(name: str, dims: list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(dims, np.int64), name)


def _noise(*shape: int, scale: float = 1.0) -> np.ndarray:
    count = math.prod(shape)
    noise = np.random.default_rng(0).standard_normal(min(count, _DRAWN), dtype=np.float32)
    noise *= np.float32(scale)
    return np.resize(noise, shape)  # the same again and again
