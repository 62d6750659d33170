"""Lookups as PyTorch has them, for runtimes that do not raise for a negative index but count it
from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.backends.large_integers import flag_of, too_large
from effcompile.core.types import Value
from effcompile.ir.program import Output, Program, TensorSpec, dtype_of
from effcompile.sites.lookups import Lookup, lookups, may_be_negative, reads_inputs, subscripts

aten = torch.ops.aten
#: An index that no axis has, in 32 bits too.
_NOWHERE = (1 << 31) - 1


def bounded_inputs(program: Program) -> dict[fx.Node, int]:
    """Inputs that are looked up in weights as they are, and the rows of the smallest: an Executable looks at
    their values at each call. Not numbers of which some are indices (Pix2Struct's patches begin with theirs).
    """
    found: dict[fx.Node, int] = {}
    for lookup in lookups(program):
        numbers = dtype_of(lookup.source)
        if numbers is not None and numbers.is_floating_point and not lookup.whole:
            continue
        if lookup.constant and lookup.size and lookup.ignored is None and lookup.source.op == "placeholder":
            found[lookup.source] = min(lookup.size, found.get(lookup.source, lookup.size))
    return found


def unchecked(program: Program) -> list[Lookup]:
    """The lookups whose index nobody has looked at before: it is computed in the graph, and may be negative,
    or too large in silence.
    """
    checked, negative = bounded_inputs(program), {found.node for found in may_be_negative(program)}

    def passes(found: Lookup) -> bool:
        if found.node.target is aten.one_hot.default:
            return not reads_inputs(found.index) or checked.get(found.source, math.inf) <= found.size
        return found.source in checked or found.node not in negative

    return [found for found in lookups(program) if not passes(found)]


def raising(program: Program) -> Program:
    """The program with each negative index that is not checked moved out of range, where the runtimes raise.

    What they take for a row of zeros (`one_hot`) is first looked up among the classes.
    """
    found = unchecked(program)
    if not found:
        return program
    edited = program.editable("indices")
    same = dict(zip(program.graph.nodes, edited.graph.nodes, strict=True))
    for lookup in found:
        node, index = same[lookup.node], same[lookup.index]
        with edited.graph.inserting_before(node):
            call = _caller(edited.graph, index)
            wrong = call(aten.lt.Scalar, index, 0)
            if lookup.ignored is not None:
                wrong = call(aten.logical_and.default, wrong, call(aten.ne.Scalar, index, lookup.ignored))
            moved = call(aten.masked_fill.Scalar, index, wrong, _NOWHERE)
            if lookup.node.target is aten.one_hot.default and lookup.size:
                moved = call(aten.index.Tensor, call(aten.arange.default, lookup.size), [moved])
        node.args = tuple(moved if place == lookup.at else arg for place, arg in enumerate(node.args))
    edited.graph.lint()
    edited.module.recompile()
    return edited


def flagged(program: Program, limit: int | None = None) -> Program:
    """The program with one more output, whether all indices are in range, and all integers that it makes of
    its inputs below `limit`; the program itself where none has to be looked at.

    For runtimes that raise for no index at all. What is out of range is 0 for the operator: OpenVINO's
    `GatherElements` ends a call without a word and leaves the answer of the last one, its `ScatterUpdate`
    writes where no tensor is, and of `x[i, j]` it counts no index from the end.
    """
    program = _without_take(program)
    looked_up, counted = _to_flag(program)
    large = [] if limit is None else too_large(program, bounded_inputs(program), limit)
    if not looked_up and not counted and not large:
        return program
    edited = program.editable("indices")
    same = dict(zip(program.graph.nodes, edited.graph.nodes, strict=True))
    output, tensors = edited.graph.output_node(), edited.tensor_results()
    every = [_kept_in_range(edited.graph, lookup, same) for lookup in (*looked_up, *counted)]
    flags = [flag for flag in every if flag is not None]
    with edited.graph.inserting_before(output):
        flags += [flag_of(edited.graph, same[node], limit) for node in large if limit is not None]
    if flags:
        with edited.graph.inserting_before(output):
            fine = flags[0]
            for flag in flags[1:]:
                fine = edited.graph.call_function(aten.logical_and.default, (fine, flag))
        output.args = ((*tensors, fine),)
        codegen: Any = edited.graph._codegen
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=pytree.tree_structure(output.args[0]))
        spec = TensorSpec(name="indices_in_range", dtype="bool", shape=())
        edited = replace(
            edited, outputs=(*edited.outputs, spec), returned=(Output.TENSOR,) * (len(tensors) + 1)
        )
    edited.graph.lint()
    edited.module.recompile()
    return edited


def _without_take(program: Program) -> Program:
    """The program with `x.take(i)` as `x.reshape(-1)[i]`."""
    if not any(program.calls(aten.take.default)):
        return program
    edited = program.editable("take")
    for node in edited.graph.find_nodes(op="call_function", target=aten.take.default):
        with edited.graph.inserting_before(node):
            flat = edited.graph.call_function(aten.reshape.default, (node.args[0], [-1]))
        node.target, node.args = aten.index.Tensor, (flat, [node.args[1]])
    edited.graph.lint()
    edited.module.recompile()
    return edited


def _to_flag(program: Program) -> tuple[list[Lookup], list[Lookup]]:
    """The lookups that nobody has looked at before, and the indices that may count from the end or that the
    inputs decide.
    """
    checked = bounded_inputs(program)
    subscribed = list(subscripts(program))
    negative = {(found.node, found.part) for found in may_be_negative(program, subscribed)}
    return [
        lookup for lookup in lookups(program) if lookup.source not in checked and reads_inputs(lookup.index)
    ], [
        lookup
        for lookup in subscribed
        if (lookup.node, lookup.part) in negative or reads_inputs(lookup.index)
    ]


def _kept_in_range(graph: fx.Graph, lookup: Lookup, same: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """A scalar: no index of this lookup is out of range; None where that is known. The operator is given 0 in
    the place of those that are.
    """
    node, index = same[lookup.node], same[lookup.index]
    with graph.inserting_before(node):
        call = _caller(graph, index)
        size: Value = lookup.size
        if lookup.held is not None and not lookup.constant:  # it may be another one in another call
            size = graph.call_function(aten.sym_size.int, (same[lookup.held], lookup.axis))
        if lookup.from_end:
            below = call(aten.lt.Scalar, index, 0)
            index = call(aten.where.self, below, call(aten.add.Tensor, index, size), index)
        fine = call(aten.ge.Scalar, index, 0)
        if size:
            fine = call(aten.logical_and.default, fine, call(aten.lt.Scalar, index, size))
        if lookup.ignored is not None:
            fine = call(aten.logical_or.default, fine, call(aten.eq.Scalar, index, lookup.ignored))
        index = call(aten.masked_fill.Scalar, index, call(aten.logical_not.default, fine), 0)
        flag = call(aten.all.default, fine) if reads_inputs(lookup.index) else None
    given: list[Any] = list(node.args)
    if lookup.part < 0:
        given[lookup.at] = index
    else:
        parts = list(given[lookup.at])
        parts[lookup.part] = index
        given[lookup.at] = parts
    node.args = tuple(given)
    return flag


def _caller(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    def call(target: Callable[..., object], *args: Value) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {name: value for name, value in like.meta.items() if name == "val"}
        return node

    return call
