"""`effcompile::attention` as aten operators again, for runtimes that have no kernel for it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from effcompile.core.errors import LoweringError
from effcompile.core.types import Arguments
from effcompile.ir.program import Program
from effcompile.ops.mask import BAND, IDS
from effcompile.sites.attention.find.fx_queries import aten
from effcompile.sites.attention.find.normal_form import tensor_of
from effcompile.sites.attention.node_builder import Emitter, repeated_heads

#: Arguments that say who sees whom in closed form.
_CLOSED = (*IDS, "tiles", *BAND)


def ours(program: Program) -> list[fx.Node]:
    """The calls of `effcompile::attention`, in graph order."""
    return list(program.calls(torch.ops.effcompile.attention.default))


def arguments(node: fx.Node) -> Arguments:
    """The arguments of a call of `effcompile::attention` by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def without_ours(program: Program) -> Program:
    """The program with no call of `effcompile::attention`.

    Raises:
        LoweringError: one has its mask in closed form, which only torch runs.
    """
    if not ours(program):
        return program
    edited = program.editable("")
    for node in ours(edited):
        if told := [name for name in _CLOSED if arguments(node)[name] not in (None, 0, [])]:
            raise LoweringError(
                f"{node.name} has its mask in closed form ({told[0]}), which this backend does not run. "
                "Plan again."
            )
    expand(edited.graph, ours(edited))
    edited.module.recompile()
    return replace(edited, history=program.history)


def expand(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    """Replace calls whose masks are dense by products, a softmax and what is between, in place."""
    emit = Emitter(graph)
    for node in nodes:
        given = arguments(node)
        (out,) = (user for user in node.users if user.target is operator.getitem and user.args[1] == 0)
        result = _written_out(emit.before(out), given)
        result.meta = {**out.meta, **result.meta}
        out.replace_all_uses_with(result)
        graph.erase_node(out)
        graph.erase_node(node)


def _written_out(emit: Emitter, given: Arguments) -> fx.Node:
    q, k, v = given["q"], given["k"], given["v"]
    times = int(tensor_of(q).shape[1]) // int(tensor_of(k).shape[1])
    if times > 1:
        k, v = (repeated_heads(emit, side, times) for side in (k, v))
    scores = emit.call(aten.matmul.default, (q, emit.call(aten.transpose.int, (k, -2, -1))))
    scores = emit.call(aten.mul.Tensor, (scores, given["scale"]))
    if cap := given["softcap"]:
        scores = emit.call(
            aten.mul.Tensor, (emit.call(aten.tanh.default, (emit.call(aten.div.Tensor, (scores, cap)),)), cap)
        )
    if given["bias"] is not None:
        scores = emit.call(aten.add.Tensor, (scores, given["bias"]))
    if given["mask"] is not None:
        fill = torch.finfo(tensor_of(scores).dtype).min if given["uniform_empty"] else -torch.inf
        scores = emit.call(
            aten.masked_fill.Scalar, (scores, emit.call(aten.logical_not.default, (given["mask"],)), fill)
        )
    if given["sink"] is not None:
        scores = emit.call(aten.cat.default, ([scores, _column(emit, scores, given["sink"])], -1))
    dtype = tensor_of(q).dtype
    weights = emit.call(aten.softmax.int, (scores, -1), {"dtype": torch.float32})
    if given["sink"] is not None:
        weights = emit.call(aten.slice.Tensor, (weights, -1, 0, -1))
    if dtype != torch.float32:
        weights = emit.call(aten.to.dtype, (weights, dtype))
    return emit.call(aten.matmul.default, (weights, v))


def _column(emit: Emitter, scores: fx.Node, sink: fx.Node) -> fx.Node:
    """[H], or broadcastable to [B, H, S], as one more column of the scores."""
    axes = tensor_of(sink).ndim
    rows = emit.call(
        aten.unsqueeze.default, (emit.call(aten.view.default, (sink, [1, -1, 1])) if axes == 1 else sink, -1)
    )
    first = emit.call(aten.slice.Tensor, (scores, -1, 0, 1))
    return emit.call(aten.add.Tensor, (emit.call(aten.zeros_like.default, (first,)), rows))
