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

from effcompile.core.types import Value
from effcompile.ir.program import Output, Program, TensorSpec, dtype_of
from effcompile.sites.lookups import Lookup, lookups, may_be_negative, reads_inputs

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


def flagged(program: Program) -> Program:
    """The program with one more output, whether all indices are in range; the program itself where none has
    to be looked at.

    For runtimes that raise for no index at all.
    """
    checked = bounded_inputs(program)
    found = [
        lookup for lookup in lookups(program) if lookup.source not in checked and reads_inputs(lookup.index)
    ]
    if not found:
        return program
    edited = program.editable("indices")
    same = dict(zip(program.graph.nodes, edited.graph.nodes, strict=True))
    output, tensors = edited.graph.output_node(), edited.tensor_results()
    with edited.graph.inserting_before(output):
        flags = [_in_range(edited.graph, lookup, same) for lookup in found]
        fine = flags[0]
        for flag in flags[1:]:
            fine = edited.graph.call_function(aten.logical_and.default, (fine, flag))
    output.args = ((*tensors, fine),)
    codegen: Any = edited.graph._codegen
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=pytree.tree_structure(output.args[0]))
    edited.graph.lint()
    edited.module.recompile()
    spec = TensorSpec(name="indices_in_range", dtype="bool", shape=())
    return replace(edited, outputs=(*edited.outputs, spec), returned=(Output.TENSOR,) * (len(tensors) + 1))


def _in_range(graph: fx.Graph, lookup: Lookup, same: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A scalar: no index of this lookup is out of range, as far as the length of its axis is fixed."""
    index = same[lookup.index]
    call = _caller(graph, index)
    fine = call(aten.ge.Scalar, index, 0)
    if lookup.size:
        fine = call(aten.logical_and.default, fine, call(aten.lt.Scalar, index, lookup.size))
    if lookup.ignored is not None:
        fine = call(aten.logical_or.default, fine, call(aten.eq.Scalar, index, lookup.ignored))
    return call(aten.all.default, fine)


def _caller(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    def call(target: Callable[..., object], *args: Value) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {name: value for name, value in like.meta.items() if name == "val"}
        return node

    return call
