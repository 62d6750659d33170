"""Attentions told what their masks are: `effcompile::attention` with bands, padding and documents in the
place of dense masks.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.mask import Edge
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.ops.mask import BAND, OPERANDS
from effcompile.sites.attention.expand import arguments
from effcompile.sites.attention.find.fx_queries import aten
from effcompile.sites.attention.find.match import SDPA, match_sdpa
from effcompile.sites.attention.find.normal_form import (
    AttentionMatch,
    NotThisFormError,
    Operand,
    Term,
    Unmatched,
    same,
    tensor_of,
)
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.attention.mask.mask_guards import conjunction
from effcompile.sites.attention.mask.node_expressions import Expression
from effcompile.sites.attention.mask.recover import Sense, recover_mask
from effcompile.sites.attention.node_builder import Emitter
from effcompile.sites.attention.rewrite import Masking, rewrite

#: Tiles in which the visible part of a mask is counted, in elements.
TILE = 64


def mask_of(program: Program, node: fx.Node) -> GraphMask | None:
    """What is known of an attention's mask; None where it has none that hides anything, or `is_causal`.

    Args:
        program: what was found is kept for it and its copies: nodes of the mask are those of the graph in
            which it was first asked for, which an Emitter knows by their names in a copy.
        node: an SDPA, or an `effcompile::attention` whose mask is dense.
    """
    operand = dense_mask(node)
    if operand is None:
        return None
    q_len, k_len = shape_of(node.args[0])[2], shape_of(node.args[1])[2]  # type: ignore[arg-type]
    key = (operand.name, dtype_of(operand), shape_of(operand), q_len, k_len)
    found = program.recovered.get(key)
    if not isinstance(found, GraphMask) or not _still_computed(found, program):
        sense: Sense = "visible" if dtype_of(operand) is torch.bool else "added"
        found = program.recovered[key] = recover_mask(program, operand, sense=sense, q_len=q_len, k_len=k_len)
    return found if found.hides else None


def _still_computed(mask: GraphMask, program: Program) -> bool:
    """Whether all that a mask of another copy is made of stands in this one."""
    here = {node.name: node.target for node in program.graph.nodes}
    return all(here.get(node.name) == node.target for node in (*mask.sources, *mask.biases))


def visible_keys(mask: GraphMask, k_len: int) -> int:
    """Keys that a query sees in the mean at the example, whole tiles counted; all, where the mask's values
    are the model's own and were not looked at.
    """
    if TILE not in mask.counts:
        return k_len
    empty, full, partial = mask.counts[TILE]
    return max(1, round(k_len * (full + partial) / max(1, empty + full + partial)))


def is_causal(mask: GraphMask) -> bool:
    """Whether it is what SDPA's `is_causal` is: key j is seen by query i where j ≤ i, and nothing else."""
    return (
        mask.static
        and mask.hi == Edge(offset=0)
        and mask.lo is None
        and not mask.chunk
        and not mask.biases
        and not mask.guards
    )


def in_closed_form(program: Program, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Replace attentions by `effcompile::attention` with their masks in closed form, in place; old node → new
    one.

    Where a mask has guards it is `attention_guarded`, which reads the dense mask in calls that break one.

    Args:
        program: an editable copy; its nodes are replaced.
        nodes: attentions of it that `mask_of` knows the masks of, or that have none.

    Raises:
        NotThisFormError: an attention is not what it was matched as.
    """
    masks = {node: mask_of(program, node) for node in nodes}
    written = {
        node: dense
        for node, mask in masks.items()
        if mask is not None and mask.guards and (dense := dense_mask(node)) is not None
    }
    with _alive(program.graph, list(written.values())):
        replaced = _told_all(program, masks)
        emit = Emitter(program.graph)
        for node, dense in written.items():
            mask = masks[node]
            assert mask is not None, "it has guards"
            replaced[node] = _guard(emit, replaced[node], mask, dense)
    return replaced


@contextlib.contextmanager
def _alive(graph: fx.Graph, values: Sequence[fx.Node]) -> Iterator[None]:
    """The values are read by the graph's output for a while."""
    output = graph.output_node()
    results = output.args
    output.args = ((*results, tuple(values)),)
    yield
    output.args = results


def _told_all(program: Program, masks: Mapping[fx.Node, GraphMask | None]) -> dict[fx.Node, fx.Node]:
    """Each call with its mask told; an SDPA is read for what it is, and the graph is not searched again."""
    emit = Emitter(program.graph)
    ours = [node for node in masks if node.target is not SDPA]
    for node in ours:
        _retold(emit.before(node), node, masks[node])
    found = [match_sdpa(node) for node in masks if node.target is SDPA]
    replaced = dict(zip(ours, ours, strict=True))
    for outcome in rewrite(
        program.graph, matches=found, masking=lambda one: _masking(one, masks[one.anchor])
    ):
        if isinstance(outcome, Unmatched):
            raise NotThisFormError(outcome.reason)
        replaced[outcome.match.anchor] = outcome.node
    return replaced


def _guard(emit: Emitter, node: fx.Node, mask: GraphMask, written: fx.Node) -> fx.Node:
    """A call of `effcompile::attention` as one that looks at the mask's guards, in place."""
    given = arguments(node)
    (out,) = (user for user in node.users if user.target is operator.getitem)
    emit.before(node)
    holds = conjunction(emit, [guard.holds(emit) for guard in mask.guards])
    closed = [given[name] for name in OPERANDS]
    form = {name: given[name] for name in ("scale", "softcap", *BAND, "uniform_empty")}
    call = emit.call(
        torch.ops.effcompile.attention_guarded.default,
        (given["q"], given["k"], given["v"], holds, written, *closed),
        form,
    )
    call.meta = {**node.meta, **call.meta}
    out.replace_all_uses_with(call)
    emit.graph.erase_node(out)
    emit.graph.erase_node(node)
    return call


def set_causal(program: Program, nodes: Sequence[fx.Node]) -> None:
    """Tell SDPAs, whose masks are causal, so, and take the masks away; in place."""
    for node in nodes:
        args = [*node.args[:3], None, 0.0, True]
        node.args, node.kwargs = (
            tuple(args),
            {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")},
        )


def set_flex(program: Program, nodes: Sequence[fx.Node]) -> None:
    """Replace calls of `effcompile::attention` by FlexAttention, in place; their masks are static."""
    for node in nodes:
        given = arguments(node)
        with program.graph.inserting_before(node):
            form = {name: given[name] for name in ("scale", "softcap", *BAND)}
            flex = program.graph.call_function(
                torch.ops.effcompile.attention_flex.default, (given["q"], given["k"], given["v"]), form
            )
        (out,) = list(node.users)
        flex.meta = {**node.meta, "val": out.meta["val"]}
        out.replace_all_uses_with(flex)
        program.graph.erase_node(out)
        program.graph.erase_node(node)


def dense_mask(node: fx.Node) -> fx.Node | None:
    """The mask that an attention reads, or the bias that one may be in."""
    if node.target is SDPA:
        value: Any = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    else:
        given = arguments(node)
        value = given["mask"] if given["mask"] is not None else given["bias"]
    return value if isinstance(value, fx.Node) else None


def _masking(found: AttentionMatch, mask: GraphMask | None) -> Masking:
    if mask is None:
        return Masking(bias=found.edits, hi=0 if found.causal else None)
    return _told(mask, found.q.val, found.k.val)


def _told(mask: GraphMask, q: Tensor, k: Tensor) -> Masking:
    biases = tuple(Term(value=_four(Operand.of(node)), kind="bias") for node in mask.biases)
    return mask.told(Masking, ids=_value, condition=_all, limit=lambda edge: _limit(edge, q, k), bias=biases)


def _retold(emit: Emitter, node: fx.Node, mask: GraphMask | None) -> None:
    """The arguments of a call of `effcompile::attention`, whose bias was all that it knew, set to what its
    mask is.
    """
    if mask is None:
        return
    given = arguments(node)
    said = _told(mask, tensor_of(given["q"]), tensor_of(given["k"]))
    bias = (
        given["bias"] if given["mask"] is not None else emit.additive(said.bias, tensor_of(given["q"]).dtype)
    )
    node.args = (given["q"], given["k"], given["v"], bias, given["sink"], *said.put(emit))
    empty = given["uniform_empty"] or said.uniform_empty
    node.kwargs = {**node.kwargs, **said.numbers, "uniform_empty": empty}


def _value(expression: Expression) -> Operand:
    value = Operand.of(expression.node)
    for target, args in expression.steps:
        value = value.then(target, *args)
    return value


def _all(conditions: Sequence[Expression]) -> Operand:
    """All of them, broadcast; there is at least one."""
    first, *others = map(_value, conditions)
    for other in others:
        first = first.then(aten.bitwise_and.Tensor, other)
    return first


def _four(value: Operand) -> Operand:
    while value.val.ndim < 4:
        value = value.then(aten.unsqueeze.default, 0)
    return value


def _limit(edge: Edge, q: Tensor, k: Tensor) -> int:
    """A limit of j − i as a number.

    Raises:
        NotThisFormError: it depends on lengths that are dynamic and not known to be equal.
    """
    if not edge.aligned or same(q.shape[2], k.shape[2]):
        return edge.offset
    if isinstance(q.shape[2], torch.SymInt) or isinstance(k.shape[2], torch.SymInt):
        raise NotThisFormError("its band ends at the last key, and both lengths are dynamic")
    return edge.at(q.shape[2], k.shape[2])
