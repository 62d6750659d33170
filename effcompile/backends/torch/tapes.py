"""Runs of operators that hold their weights as one call each (ops/tape.py)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import fx

from effcompile.backends.torch.joined import NodeRun, joined, put_call, values_read
from effcompile.backends.torch.tidy import sizes
from effcompile.ir.program import dtype_of, shape_of
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.bf16_linear import HeldHalves
from effcompile.ops.bf16_mlp import HeldHalvesMlp
from effcompile.ops.fp32_attention import HeldAttention
from effcompile.ops.fp32_linear import HeldFloats
from effcompile.ops.int8_held import HeldLinear, HeldMlp, HeldWords
from effcompile.ops.rows_held import HeldAdd, HeldGate, HeldNorm, HeldRmsNorm, HeldTurn
from effcompile.ops.tape import Columns, Second, Tape, TapeStep

aten = torch.ops.aten

_HELD = (
    HeldLinear,
    HeldWords,
    HeldFloats,
    HeldHalves,
    HeldMlp,
    HeldHalvesMlp,
    HeldAttention,
    HeldNorm,
    HeldAdd,
    HeldRmsNorm,
    HeldGate,
    HeldTurn,
)
_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor)
#: What makes a tensor that shares no memory with another one.
_FRESH = (
    aten.add.Tensor, aten.mul.Tensor, aten.embedding.default, aten.layer_norm.default, aten.linear.default,
    aten.cat.default, torch.ops.mkldnn._linear_pointwise.default, add_layer_norm_on_cpu,
)  # fmt: skip


def with_tapes(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed: each run of operators that hold their weights, with sums between, is one call."""
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _is_residual(node):
            node.target = HeldAdd()
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    for found in list(joined(module.graph, order, _joins)):
        if not _replace(module.graph, found, order):
            alone = [node for node in found if _split_of(node) is None]
            joins = lambda node, run, alone=alone: node in alone and _joins(node, run)  # noqa: E731
            for part in list(joined(module.graph, order, joins)):
                _replace(module.graph, part, order)
    module.graph.lint()
    module.recompile()
    return module


def _is_residual(add: fx.Node) -> bool:
    """Whether it is of two values of one shape in fp32, and stands beside what holds its weights."""
    if add.kwargs or not all(isinstance(each, fx.Node) and each.op != "get_attr" for each in add.args):
        return False
    three = (add, *add.all_input_nodes)
    known = all(isinstance(each.meta.get("val"), torch.Tensor) for each in three)
    alike = known and len({sizes(each) for each in three}) == 1
    near = any(isinstance(each.target, _HELD) for each in (*add.all_input_nodes, *add.users))
    return near and alike and all(dtype_of(each) == torch.float32 for each in three)


def _joins(node: fx.Node, run: NodeRun) -> bool:
    """Whether it holds its weights, or is a view of columns of what is inside."""
    if node.op != "call_function":
        return False
    if node.target in _SPLITS:
        return node.args[0] in run.nodes and _sizes(node) is not None
    if node.target is operator.getitem:
        several = node.args[0]
        return isinstance(several, fx.Node) and several in run.nodes
    # rows that are constant (the norm of a table of positions) are no value that a tape is given; masks and
    # rotations that no input reaches are
    rows = node.args[0] if node.args else None
    return isinstance(node.target, _HELD) and not (isinstance(rows, fx.Node) and rows.op == "get_attr")


def _sizes(split: fx.Node) -> list[int] | None:
    """Columns of each part; None where it divides another axis, or what is free."""
    source, sizes, *axis = split.args
    wide = shape_of(source)  # type: ignore[arg-type]
    at = axis[0] if axis else split.kwargs.get("dim", 0)
    if at not in (-1, len(wide) - 1) or not isinstance(wide[-1], int):
        return None
    if isinstance(sizes, int):
        count, rest = divmod(wide[-1], sizes)
        return [sizes] * count + [rest] * (rest > 0)
    fixed = isinstance(sizes, (list, tuple)) and all(isinstance(size, int) for size in sizes)
    return list(sizes) if fixed else None  # type: ignore[arg-type]


def _replace(graph: fx.Graph, nodes: Sequence[fx.Node], order: dict[fx.Node, int]) -> bool:
    """One call in the place of these; False where a view, or one of several values, is read outside."""
    nodes = _without_first(nodes)
    inside = set(nodes)
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    if not results or any(_split_of(node) or _is_divided(node, inside) for node in results):
        return not nodes
    inputs = list(
        dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    )
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for each in inputs:
        if each.op == "get_attr" and each is not start:  # the call may stand before the first that reads it
            start.prepend(each)
    numbers = {node: at for at, node in enumerate(inputs)}
    steps = list[TapeStep]()
    for node in nodes:
        if node.target in _SPLITS:
            continue
        if node.target is operator.getitem and _split_of(node) is None and node.args[1] == 0:
            numbers[node] = numbers[node.args[0]]  # type: ignore[index]
            continue
        step = _step(node, numbers)
        numbers[node] = len(inputs) + len(steps)
        steps.append(step)
    free = [at for at, node in enumerate(inputs) if _is_given_up(node, inside)]
    tape = Tape(steps, len(inputs), [numbers[node] for node in results], free)
    put_call(graph, nodes, tape, inputs, results, order)
    return True


def _without_first(nodes: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """Without norms and sums at the beginning that alone read what they are given: it would stay until the
    end.
    """
    first = next((at for at, node in enumerate(nodes) if not _ends_inputs(node, nodes)), len(nodes))
    return nodes[first:]


def _ends_inputs(norm: fx.Node, nodes: Collection[fx.Node]) -> bool:
    read = [each for each in values_read(norm) if each not in nodes]
    return isinstance(norm.target, HeldNorm | HeldAdd) and any(set(each.users) == {norm} for each in read)


def _split_of(node: fx.Node) -> fx.Node | None:
    """What a node is a part of, or the split itself; None of anything else."""
    made_by = node.args[0] if node.target is operator.getitem else node
    return made_by if isinstance(made_by, fx.Node) and made_by.target in _SPLITS else None


def _is_divided(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether it makes several values, which are told apart outside."""
    return any(user.target is operator.getitem and user not in inside for user in node.users)


def _step(node: fx.Node, numbers: dict[fx.Node, int]) -> TapeStep:
    if node.target is operator.getitem and (split := _split_of(node)) is not None:
        part, sizes = node.args[1], _sizes(split)
        assert isinstance(part, int) and sizes is not None, "only such splits join"
        start = [0, *accumulate(sizes)][part]
        return TapeStep(Columns(start, sizes[part]), (numbers[split.args[0]],))  # type: ignore[index]
    if node.target is operator.getitem:
        return TapeStep(Second, (numbers[node.args[0]],))  # type: ignore[index]
    reads = tuple(numbers[each] if isinstance(each, fx.Node) else None for each in node.args)
    return TapeStep(node.target, reads)  # type: ignore[arg-type]


def _is_given_up(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether nothing outside reads an input, and its memory is its own."""
    made = node.target is operator.getitem and isinstance(node.args[0].target, Tape)  # type: ignore[union-attr]
    fresh = made or node.target in _FRESH or isinstance(node.target, _HELD)
    return fresh and all(user in inside for user in node.users)
