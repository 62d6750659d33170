"""Times one operator at a time in OpenVINO, compiled with the settings of the lowered model.

Several copies run in one model, each with constants and inputs of its own: what a call of any model costs is
then shared among them as in a real model, and constants do not stay in the cache from one call to the next.
Linears have one x, as q, k and v do, and give back a row: with inputs and results of their own, which were
converted for bf16 one by one and were more than the caches hold, they took 1.05 (fp32), 1.15 (int8) and 1.2
times (bf16) as long as one behind the other, as in a model; on a busy machine up to 1.5 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from effcompile.backends.openvino.codes import ACTIVATION_GROUP, FAMILIES, coded
from effcompile.core.arrays import Array
from effcompile.core.timing import SETTLED, median_seconds
from effcompile.ir.formats import WeightFormat
from effcompile.machine.target import Dims, KernelCall

#: A model, a node or a request of openvino, which ships no types.
Untyped = Any
#: Kernels whose weights are codes; the property that says how many activations share a scale beside them.
IN_CODES = tuple(f"linear/{family}" for family in FAMILIES)
ROUNDED = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
#: A table for timing lookups: larger than a vocabulary's cached part, small enough to allocate at once.
_TABLE_ROWS = 30_000

#: Seconds of what is measured as a difference, at the least: none at all would be a kernel that is not there.
_LEAST = 1e-7
#: The shape of a linear that something is fused into.
_COLUMNS, _NARROW = 1024, 64
_MOST_COPIES = 8
_COPIES_BYTES = 64 * 2**20  # of inputs, constants and outputs together


def config(precision: str) -> dict[str, Any]:
    """Compilation for the latency of one call at torch's thread count. `precision`: "f32" or "bf16"."""
    return {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }


def measure(call: KernelCall) -> float | None:
    """Seconds of one kernel within a warm call, or None where OpenVINO has no such kernel."""
    make, precision = KERNELS.get(call.kernel), "bf16" if call.kernel.endswith("/bf16") else "f32"
    if call.kernel in IN_CODES and call.format is not None:
        make = _linears(partial(_product_in_codes, held=call.format))
    if make is None:
        return None
    without = WITHOUT.get(call.kernel)
    seconds = _seconds(make, call, precision)
    return seconds if without is None else max(_LEAST, seconds - _seconds(without, call, precision))


def _seconds(make: Make, call: KernelCall, precision: str) -> float:
    import openvino

    copies = max(1, min(_MOST_COPIES, int(_COPIES_BYTES / call.bytes)))
    made = make(call.dims, copies)
    outputs = [output for each, _, _ in made for output in (each if isinstance(each, list) else [each])]
    inputs = [parameter for _, parameters, _ in made for parameter in parameters]
    data = [value for _, _, values in made for value in values]
    given = config(precision) | ({ROUNDED: ACTIVATION_GROUP} if call.kernel in IN_CODES else {})
    compiled = openvino.Core().compile_model(openvino.Model(outputs, inputs), "CPU", given)
    request = compiled.create_infer_request()
    return (
        median_seconds(lambda: request.infer(data, share_inputs=True, share_outputs=True), settled=SETTLED)
        / copies
    )


Made = tuple[Any, list[Any], list[Array]]  # output or outputs, parameters, their values
Make = Callable[[Dims, int], list[Made]]  # so many copies


def _each(make: Callable[[Dims], Made]) -> Make:
    """Copies that have nothing in common."""
    return lambda dims, copies: [make(dims) for _ in range(copies)]


_NUMBERS = np.random.default_rng(0)  # constants that are equal are one, and what is computed of them, too


def _random(*shape: int) -> Array:
    return _NUMBERS.standard_normal(shape, dtype=np.float32)


def _bytes(*shape: int) -> Array:
    return _NUMBERS.integers(-127, 128, shape, dtype=np.int8)


def _parameter(value: Array) -> Untyped:
    from openvino import opset13 as ops

    return ops.parameter(value.shape, value.dtype)


def _linears(product: Callable[[Untyped, Dims], Untyped]) -> Make:
    """Products of one x with weights of their own, of which a row each is given back."""

    def make(dims: Dims, copies: int) -> list[Made]:
        from openvino import opset13 as ops

        x = _random(*dims[:2])
        parameter, (none, one) = _parameter(x), (np.array([end], np.int64) for end in (0, 1))
        rows = [ops.slice(product(parameter, dims), none, one, one, none) for _ in range(copies)]
        return [(rows, [parameter], [x])]

    return make


def _product(x: Untyped, dims: Dims) -> Untyped:
    from openvino import opset13 as ops

    _, k, n = dims
    return _with_bias(x, ops.constant(_random(n, k)), n)


def _with_bias(x: Untyped, weight: Untyped, n: int) -> Untyped:
    from openvino import opset13 as ops

    return ops.add(ops.matmul(x, weight, False, True), ops.constant(_random(1, n)))


def _product_int8(x: Untyped, dims: Dims) -> Untyped:
    """As NNCF writes it: FakeQuantize to 256 levels on the activation, s8 weights with a scale per output
    channel.
    """
    from openvino import opset13 as ops

    _, k, n = dims
    low, high = ops.constant(np.float32(-4)), ops.constant(np.float32(4))
    quantized = ops.fake_quantize(x, low, high, low, high, 256)
    weight = ops.convert(ops.constant(_bytes(n, k)), "f32")
    scaled = ops.multiply(weight, ops.constant(np.full((n, 1), 0.01, np.float32)))
    return _with_bias(quantized, scaled, n)


def _product_in_codes(x: Untyped, dims: Dims, held: WeightFormat) -> Untyped:
    _, k, n = dims[:3]
    return _with_bias(x, coded(_random(n, k), held), n)


def _alone(product: Callable[[Untyped, Dims], Untyped], dims: Dims) -> Made:
    x = _random(*dims[:2])
    parameter = _parameter(x)
    return product(parameter, dims), [parameter], [x]


def _matmul(dims: Dims) -> Made:
    from openvino import opset13 as ops

    b, m, k, n = dims
    values = [_random(b, m, k), _random(b, k, n)]
    parameters = [_parameter(v) for v in values]
    return ops.matmul(*parameters, False, False), parameters, values


def _attention(dims: Dims) -> Made:
    from openvino import opset13 as ops

    b, h, sq, sk, d = dims
    values = [_random(b, h, s, d) for s in (sq, sk, sk)]
    parameters = [_parameter(v) for v in values]
    return ops.scaled_dot_product_attention(*parameters), parameters, values


def _causal(dims: Dims) -> Made:
    from openvino import opset13 as ops

    b, h, sq, sk, d, _ = dims
    values = [_random(b, h, s, d) for s in (sq, sk, sk)]
    parameters = [_parameter(v) for v in values]
    return ops.scaled_dot_product_attention(*parameters, causal=True), parameters, values


def _made_by_linears(dims: Dims, *, attended: bool) -> Made:
    """q and k by two int8 linears: their heads in 8 bits and attended to, or as the linears give them."""
    from openvino import opset13 as ops

    b, h, sq, sk, d = dims
    made = [_alone(_product_int8, (b * s, h * d, h * d)) for s in (sq, sk)]
    value = _random(b, h, sk, d)
    parameters, values = [made[0][1][0], made[1][1][0]], [made[0][2][0], made[1][2][0]]
    if not attended:
        return [output for output, _, _ in made], parameters, values
    # symmetric: other heads are taken for numbers beyond 8 bits, and attended to in 32
    low, high = ops.constant(np.float32(-4 * 128 / 127)), ops.constant(np.float32(4))
    heads = []
    for (output, _, _), size in zip(made, (sq, sk), strict=True):
        rounded = ops.fake_quantize(output, low, high, low, high, 256)  # where NNCF moves it to
        split = ops.reshape(rounded, ops.constant(np.array([b, size, h, d], np.int64)), False)
        heads.append(ops.transpose(split, ops.constant(np.array([0, 2, 1, 3], np.int64))))
    parameter = _parameter(value)
    return ops.scaled_dot_product_attention(*heads, parameter), [*parameters, parameter], [*values, value]


def _norm(x: object, cols: int) -> Any:
    from openvino import opset13 as ops

    axes = ops.constant(np.array([-1], np.int64))
    normed = ops.mvn(x, axes, True, 1e-5, "INSIDE_SQRT")
    return ops.add(ops.multiply(normed, ops.constant(_random(cols))), ops.constant(_random(cols)))


def _layer_norm(dims: Dims) -> Made:
    x = _random(*dims)
    parameter = _parameter(x)
    return _norm(parameter, dims[-1]), [parameter], [x]


def _add_norm(dims: Dims) -> Made:
    from openvino import opset13 as ops

    values = [_random(*dims), _random(*dims)]
    parameters = [_parameter(v) for v in values]
    return _norm(ops.add(*parameters), dims[-1]), parameters, values


def _unary(name: str, *args: object) -> Callable[[Dims], Made]:
    def make(dims: Dims) -> Made:
        from openvino import opset13 as ops

        x = _random(*dims)
        parameter = _parameter(x)
        return getattr(ops, name)(parameter, *args), [parameter], [x]

    return make


def _behind_a_linear(dims: Dims, *, name: str, args: Sequence[object] = ()) -> Made:
    """A function of what a narrow linear gives, fused into it; the linear alone without a name."""
    from openvino import opset13 as ops

    columns = min(_COLUMNS, dims[0])
    output, parameters, values = _alone(_product, (max(1, dims[0] // columns), _NARROW, columns))
    return (getattr(ops, name)(output, *args) if name else output), parameters, values


def _pointwise(dims: Dims) -> Made:
    from openvino import opset13 as ops

    x = _random(*dims)
    parameter = _parameter(x)
    return ops.add(parameter, ops.constant(np.float32(1))), [parameter], [x]


def _embedding(dims: Dims) -> Made:
    from openvino import opset13 as ops

    return _lookup(dims, ops.constant(_random(_TABLE_ROWS, dims[1])))


def _embedding_int8(dims: Dims) -> Made:
    from openvino import opset13 as ops

    table = ops.constant(_bytes(_TABLE_ROWS, dims[1]))
    return _lookup(
        dims,
        ops.multiply(ops.convert(table, "f32"), ops.constant(np.full((_TABLE_ROWS, 1), 0.01, np.float32))),
    )


def _lookup(dims: Dims, table: object) -> Made:
    from openvino import opset13 as ops

    ids = np.random.default_rng(0).integers(0, _TABLE_ROWS, (dims[0],), dtype=np.int64)
    parameter = _parameter(ids)
    return ops.gather(table, parameter, ops.constant(np.int64(0))), [parameter], [ids]


KERNELS: dict[str, Make] = {
    "linear/fp32": _linears(_product),
    "linear/bf16": _linears(_product),
    "linear/int8_static": _linears(_product_int8),
    "matmul/fp32": _each(_matmul),
    "attention/sdpa": _each(_attention),
    "attention/causal": _each(_causal),
    "attention/sdpa_int8": _each(partial(_made_by_linears, attended=True)),
    "norm/layer": _each(_layer_norm),
    "add_norm/split": _each(_add_norm),
    "gelu/erf": _each(partial(_behind_a_linear, name="gelu", args=("erf",))),
    "gelu/tanh": _each(partial(_behind_a_linear, name="gelu", args=("tanh",))),
    "embedding/fp32": _each(_embedding),
    "embedding/int8_rows": _each(_embedding_int8),
    "pointwise/fp32": _each(_pointwise),
    "softmax/fp32": _each(_unary("softmax", -1)),
}
#: What is timed beside a kernel, and taken from it: linears in int8 write q and k in 8 bits as cheaply as in
#: 32, while a kernel alone would first round them; GELU is a part of the linear before it, while alone it
#: reads and writes memory.
WITHOUT: dict[str, Make] = {
    "attention/sdpa_int8": _each(partial(_made_by_linears, attended=False)),
    "gelu/erf": _each(partial(_behind_a_linear, name="")),
    "gelu/tanh": _each(partial(_behind_a_linear, name="")),
}
