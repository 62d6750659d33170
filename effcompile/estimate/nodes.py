"""FLOPs, bytes and seconds of every node, from the kernels it stands for. Nothing is run.

Each call_function node of the flat aten graph maps to kernels of `effcompile.machine.target.KERNELS`; a node
that only looks at memory that is already there (a view, a getitem, a check) maps to none. The estimate is of
the graph as it stands, one kernel after another: fusion is an option that a pass prices, not something
assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from effcompile.core.cost import Provenance
from effcompile.estimate.storages import Storages, storages
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.machine.target import MATMULS, KernelCall, Target
from effcompile.ops.block_sparse import block_sparse_linear as _registers  # noqa: F401 - an operator that is priced
from effcompile.sites.attention.normalise import EAGER, OUR_ATTENTIONS
from effcompile.sites.parts import argument

aten = torch.ops.aten
Calls = tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds per call, FLOPs and bytes moved of some nodes; `provenance` is the weakest among them."""

    seconds: float = 0.0
    flops: float = 0.0
    matmul_flops: float = 0.0
    bytes: float = 0.0
    nodes: int = 0
    provenance: Provenance = Provenance.MEASURED

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            seconds=self.seconds + other.seconds,
            flops=self.flops + other.flops,
            matmul_flops=self.matmul_flops + other.matmul_flops,
            bytes=self.bytes + other.bytes,
            nodes=self.nodes + other.nodes,
            provenance=other.provenance if self.provenance is Provenance.MEASURED else self.provenance,
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted figures of a program on one backend of one target.

    `nodes` holds the nodes that cost something.
    """

    target: str
    backend: str
    nodes: Mapping[fx.Node, Figures]
    calls: Mapping[fx.Node, Calls]

    @property
    def total(self) -> Figures:
        return reduce(Figures.__add__, self.nodes.values(), Figures())

    @property
    def seconds(self) -> float:
        return self.total.seconds


def estimate(
    program: Program, target: Target, backend: str, overrides: Mapping[fx.Node, float] | None = None
) -> Estimate:
    """Predict every node of a program.

    Args:
        program: at its example inputs.
        target: prices kernels; what it cannot price on this backend is modelled from bandwidth and fp32 peak.
        backend: a key of `target.laws`, any name for targets that have none.
        overrides: node → seconds known better (a decided option's price, a fused neighbour at 0), used as
            measured.
    """
    calls = kernel_calls(program)
    prices: dict[KernelCall, tuple[float, Provenance]] = {}
    nodes = {}
    for node, kernels in calls.items():
        for call in kernels:
            if call not in prices and node not in (overrides or {}):
                prices[call] = _price(target, backend, call)
        if overrides and node in overrides:
            nodes[node] = _figures(kernels, overrides[node], Provenance.MEASURED)
        elif kernels:
            priced = [prices[call] for call in kernels]
            modelled = any(p is not Provenance.MEASURED for _, p in priced)
            nodes[node] = _figures(
                kernels, sum(s for s, _ in priced), Provenance.MODELLED if modelled else Provenance.MEASURED
            )
    return Estimate(target=target.name, backend=backend, nodes=nodes, calls=calls)


def kernel_calls(program: Program) -> dict[fx.Node, Calls]:
    """Every call_function node and the kernels it stands for, in graph order; () for views and checks."""
    held = storages(program)
    return {node: () if held.is_free(node) else _calls_of(program, held, node) for node in program.calls()}


def _price(target: Target, backend: str, call: KernelCall) -> tuple[float, Provenance]:
    priced = target.price(backend, call) or target.roofline(call)
    if priced is not None:
        return priced
    # no arithmetic of that dtype: as if in fp32, or by bandwidth alone
    compute = call.flops / target.peak_flops["fp32"] if "fp32" in target.peak_flops else 0.0
    seconds = max(compute, call.bytes / target.memory_bandwidth) / target.efficiency
    return seconds + target.launch_seconds, Provenance.MODELLED


def _figures(calls: Calls, seconds: float, provenance: Provenance) -> Figures:
    return Figures(
        seconds=seconds,
        flops=sum(call.flops for call in calls),
        matmul_flops=sum(call.flops for call in calls if call.kernel.startswith(MATMULS)),
        bytes=sum(call.bytes for call in calls),
        nodes=1,
        provenance=provenance,
    )


def _calls_of(program: Program, held: Storages, node: fx.Node) -> Calls:
    rule = _RULES.get(node.target)
    return (rule(program, node) if rule else None) or _pointwise(held, node)


# ------------------------------------------------------------------ one rule per kind of op


def _linear(program: Program, node: fx.Node) -> Calls | None:
    x, weight = _tensors(node)[:2]
    n, k = shape_of(weight) if len(shape_of(weight)) == 2 else (1, *shape_of(weight))
    return _dense(node, math.prod(shape_of(x)[:-1]), k, n)


def _block_sparse(program: Program, node: fx.Node) -> Calls | None:
    """`effcompile::block_sparse_linear` in the model itself: all blocks that there is memory for."""
    x, values, _, _, ccol = _tensors(node)[:5]
    kept, block, _ = shape_of(values)
    rows, n, k = math.prod(shape_of(x)[:-1]), shape_of(node)[-1], (shape_of(ccol)[0] - 1) * block
    return (KernelCall("linear/sparse", (rows, k, n, kept, block)),)


def _matmul(program: Program, node: fx.Node) -> Calls | None:
    """`a @ b`: a linear where b is a constant matrix, else a (batched) product of activations."""
    a, b = _tensors(node)[-2:]  # addmm and baddbmm have a bias first
    left, right = shape_of(a), shape_of(b)
    if not left or not right:
        return None
    left = left if len(left) > 1 else (1, *left)
    right = right if len(right) > 1 else (*right, 1)
    m, k, n = left[-2], left[-1], right[-1]
    if len(right) == 2:
        rows = math.prod(left[:-1])
        return (
            _dense(node, rows, k, n)
            if _constant(program, b)
            else (KernelCall("matmul/fp32", (1, rows, k, n)),)
        )
    return (KernelCall("matmul/fp32", (math.prod(torch.broadcast_shapes(left[:-2], right[:-2])), m, k, n)),)


def _einsum(program: Program, node: fx.Node) -> Calls | None:
    """Two operands as a batched product: labels in both and the result are batch, in both but not the result
    K.
    """
    equation, operands = str(node.args[0]).replace(" ", ""), _tensors(node)
    labels, _, result = equation.partition("->")
    if len(operands) != 2 or not result or "..." in equation:
        return None
    left, right = labels.split(",")
    size = dict(zip(left + right, shape_of(operands[0]) + shape_of(operands[1]), strict=True))

    def product(chosen: set[str]) -> int:
        return math.prod(size[label] for label in chosen)

    a, b, kept = set(left), set(right), set(result)
    return (
        KernelCall(
            "matmul/fp32", (product(a & b & kept), product(a - b), product((a & b) - kept), product(b - a))
        ),
    )


def _convolution(program: Program, node: fx.Node) -> Calls | None:
    """As the matrix product that im2col makes of it: (positions, inputs · window) × (inputs · window,
    outputs).
    """
    out, weight = shape_of(node), shape_of(_tensors(node)[1])
    if len(out) < 3 or len(out) != len(weight):
        return None
    return _dense(node, out[0] * math.prod(out[2:]), math.prod(weight[1:]), weight[0])


def _attention(program: Program, node: fx.Node) -> Calls | None:
    q, k = (shape_of(t) for t in _tensors(node)[:2])
    if len(q) < 3 or len(q) != len(k):
        return None
    heads = q[-3] if len(q) > 3 else 1
    batch = math.prod(q[:-3]) if len(q) > 3 else q[0]
    dims = (batch, heads, q[-2], k[-2], q[-1])
    if node.target is aten.scaled_dot_product_attention.default and argument(node, "is_causal"):
        return (KernelCall("attention/causal", (*dims, k[-2] // 2)),)
    return (KernelCall("attention/math" if node.meta.get(EAGER) else "attention/sdpa", dims),)


def _norm(kernel: str) -> Callable[[Program, fx.Node], Calls | None]:
    def rule(program: Program, node: fx.Node) -> Calls | None:
        shape, normalized = shape_of(node), node.args[1]
        axes = len(normalized) if isinstance(normalized, (list, tuple)) else 1
        return (
            KernelCall(
                kernel, (math.prod(shape[: len(shape) - axes]), math.prod(shape[len(shape) - axes :]))
            ),
        )

    return rule


def _softmax(program: Program, node: fx.Node) -> Calls | None:
    shape, axis = shape_of(node), node.args[1]
    if not shape or not isinstance(axis, int):
        return None
    return (KernelCall("softmax/fp32", (math.prod(shape) // max(shape[axis], 1), shape[axis])),)


def _gelu(program: Program, node: fx.Node) -> Calls | None:
    form = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    return (KernelCall("gelu/tanh" if form == "tanh" else "gelu/erf", (math.prod(shape_of(node)),)),)


def _embedding(program: Program, node: fx.Node) -> Calls | None:
    shape = shape_of(node)
    return (KernelCall("embedding/fp32", (math.prod(shape[:-1]), shape[-1])),)


def _lookup(program: Program, node: fx.Node) -> Calls | None:
    """Reads as much as it writes, however large the table."""
    dtype = dtype_of(node)
    size = math.prod(shape_of(node)) * (dtype.itemsize if dtype else 4)
    return (KernelCall("pointwise/fp32", (_elements(2 * size),)),)


def _pointwise(held: Storages, node: fx.Node) -> Calls:
    """Any other op: reads its operands and writes its result once, counted in fp32 elements of one read and
    one write.
    """
    read = sum(min(_bytes(t), sum(held.nbytes[s] for s in held.of[t])) for t in _tensors(node))
    written = sum(held.nbytes[s] for s in held.made[node]) or _bytes(node)
    return (KernelCall("pointwise/fp32", (_elements(read + written),)),)


_Rule = Callable[[Program, fx.Node], Calls | None]

#: aten op → rule. A rule may decline (None): the op is then priced as a pointwise one.
_RULES: dict[object, _Rule] = {
    aten.linear.default: _linear,
    torch.ops.effcompile.block_sparse_linear.default: _block_sparse,
    **dict.fromkeys(
        (
            aten.addmm.default,
            aten.mm.default,
            aten.bmm.default,
            aten.matmul.default,
            aten.baddbmm.default,
            aten.mv.default,
        ),
        _matmul,
    ),
    aten.einsum.default: _einsum,
    **dict.fromkeys(
        (
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv2d.padding,
            aten.conv1d.padding,
            aten.convolution.default,
        ),
        _convolution,
    ),
    **dict.fromkeys((aten.scaled_dot_product_attention.default, *OUR_ATTENTIONS), _attention),
    **dict.fromkeys((aten.layer_norm.default, aten.native_layer_norm.default), _norm("norm/layer")),
    **dict.fromkeys((aten.rms_norm.default, aten._fused_rms_norm.default), _norm("norm/rms")),
    **dict.fromkeys(
        (
            aten.softmax.int,
            aten._softmax.default,
            aten._safe_softmax.default,
            aten.log_softmax.int,
            aten._log_softmax.default,
        ),
        _softmax,
    ),
    aten.gelu.default: _gelu,
    aten.embedding.default: _embedding,
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default, aten.gather.default), _lookup),
}


# ------------------------------------------------------------------ small helpers


def _dense(node: fx.Node, m: int, k: int, n: int) -> Calls:
    half = dtype_of(node) in (torch.bfloat16, torch.float16)
    return (KernelCall("linear/bf16" if half else "linear/fp32", (m, k, n)),)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The node's tensor operands in order, those within lists included."""
    return [operand for operand in _flat(node.args) if isinstance(operand.meta.get("val"), torch.Tensor)]


def _flat(argument: object) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from _flat(part)


def _constant(program: Program, node: fx.Node) -> bool:
    """True for a weight, also behind a transpose or another view of it."""
    while node.op == "call_function" and node.target in (
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.detach.default,
    ):
        node = node.all_input_nodes[0]
    return program.tensor(node) is not None


def _bytes(node: fx.Node) -> int:
    dtype = dtype_of(node)
    return math.prod(shape_of(node)) * dtype.itemsize if dtype else 0


def _elements(size: int) -> int:
    """`size` bytes as elements of `pointwise/fp32`, which moves 8 bytes each; at least one."""
    return max(1, -(-size // 8))
