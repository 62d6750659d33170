"""Finds attention in an aten graph: a walk up and down from each softmax, and every
`scaled_dot_product_attention`.

Works on torch.export's graphs without decompositions, functional (Program) or not (the forward of a training
step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from effcompile.ir.program import module_path
from effcompile.sites.attention.find import fx_queries as graphs
from effcompile.sites.attention.find.fx_queries import (
    ASSERTS,
    CASTS,
    COPIES,
    DROPOUTS,
    RESHAPES,
    SOFTMAXES,
    Learned,
    argument,
    aten,
    number,
    source_of,
)
from effcompile.sites.attention.find.head_layout import Frame, Heads, one_dtype, operand, with_batch
from effcompile.sites.attention.find.normal_form import (
    AttentionMatch,
    AxisStep,
    Fill,
    NotThisFormError,
    Operand,
    Term,
    Unmatched,
    same,
    same_shape,
    tensor_of,
)
from effcompile.sites.attention.find.products import MatchedProduct, is_product, ordered, permuted
from effcompile.sites.attention.find.scores import ScoreWalk, stop_of, trail_to

SDPA = aten.scaled_dot_product_attention.default


def match(graph: fx.Graph) -> list[AttentionMatch | Unmatched]:
    """Every attention of a graph in its normal form, and every other softmax with the reason why it is none,
    in graph order.

    Nodes need `meta["val"]`. The graph is not changed.
    """
    finder = _Finder(graph)
    return [
        finder.at(node) for node in graph.nodes if node in finder.alive and node.target in SOFTMAXES | {SDPA}
    ]


def match_sdpa(node: fx.Node, kind: str = "bias") -> AttentionMatch:
    """A `scaled_dot_product_attention` in its normal form; `kind` is that of its mask, see Term.

    Raises:
        NotThisFormError: it has more than one batch axis, or operands of other forms.
    """
    named = {a.name: argument(node, i, a.name, a.default_value) for i, a in enumerate(SDPA._schema.arguments)}
    query, key, value, mask = (named[name] for name in ("query", "key", "value", "attn_mask"))
    lead = tuple(tensor_of(node).shape[:-2])
    if len(lead) > 2:
        raise NotThisFormError("it has more than one batch axis")
    heads = Heads(lead=lead)
    frame = Frame.of(query)
    (q, _), (k, _), (v, _) = (operand(x, heads, frame) for x in (query, key, value))
    q, k, v = _agreeing(q, k, v, [operand(x, heads, frame, group=False)[0] for x in (key, value)])
    size = tensor_of(query).shape[-1]
    scale = named["scale"] if named["scale"] is not None else float(size) ** -0.5
    edits: tuple[Term | Fill, ...] = ()
    if isinstance(mask, fx.Node):
        shaped = heads.split(Operand.of(mask), frame)
        hides = tensor_of(mask).dtype == torch.bool
        edits = (
            Fill(value=shaped, hidden=False, fill=-torch.inf, kind=kind)
            if hides
            else Term(value=shaped, kind=kind),
        )
    return AttentionMatch(
        site=module_path(node), anchor=node, q=q, k=k, v=v, scale=float(scale), output=node, inner=(node,),
        edits=edits, causal=bool(named["is_causal"]), dropout=float(named["dropout_p"]), empty="zero",
        restore=_back(heads, node, q, None),
    )  # fmt: skip


class _Finder:
    """What is known of the whole graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.alive = graphs.live_nodes(graph)
        self.learned = Learned(graph, graphs.activations(graph))
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.writes = [
            node for node in graph.nodes if node.op == "call_function" and any(graphs.mutated(node))
        ]

    def at(self, node: fx.Node) -> AttentionMatch | Unmatched:
        try:
            if node.target is not SDPA:
                return self._softmax(node)
            mask = argument(node, 3, "attn_mask")
            return match_sdpa(node, self.learned.kind(mask) if isinstance(mask, fx.Node) else "bias")
        except NotThisFormError as error:
            return Unmatched(node=node, site=module_path(node), reason=error.reason)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user in self.alive and user.target not in ASSERTS]

    def _softmax(self, anchor: fx.Node) -> AttentionMatch:
        axis = argument(anchor, 1, "dim")
        scores_node = source_of(anchor)
        if scores_node is None or axis not in (-1, tensor_of(anchor).ndim - 1):
            raise NotThisFormError("it is a softmax over an axis that is not the last")
        trail = trail_to(scores_node)
        if trail is None:
            stop = stop_of(scores_node)
            what = stop.target.__name__ if callable(stop.target) else f"{stop.op} {stop.target}"
            raise NotThisFormError(
                "it is no attention: its scores come from {}, not from a product of queries and keys", what
            )
        scores = ScoreWalk.along(trail, self.learned)
        down = _Weights.below(anchor, scores, self.readers)
        inner = (*trail, *scores.aside, anchor, *down.chain)
        self._only_inner(inner, down)
        found = _assemble(anchor, scores, down, inner)
        self._unwritten(found, trail[0])
        return found

    def _only_inner(self, inner: tuple[fx.Node, ...], down: _Weights) -> None:
        """Scores that others read would have to be kept, in place or not."""
        allowed = {*inner, down.output}
        for node in inner:
            other = next((user for user in self.readers(node) if user not in allowed), None)
            if other is not None and node is not down.shared:
                raise NotThisFormError("its scores ({}) are read by {} too", node.name, other.name)

    def _unwritten(self, found: AttentionMatch, first: fx.Node) -> None:
        """The new node reads its operands where the last product stood: nobody may write to them
        in between.
        """
        read = {graphs.root_of(value.node) for value in operands_of(found)}
        for node in self.writes:
            between = self.position[first] < self.position[node] < self.position[found.output]
            if (
                between
                and node not in found.inner
                and any(graphs.root_of(target) in read for target in graphs.mutated(node))
            ):
                raise NotThisFormError("{} writes to its operands between the products", node.name)


class _Weights:
    """The way down from the softmax: casts, dropout, views, the sink's slice, to the product with v."""

    def __init__(self, chain: list[fx.Node], output: fx.Node, shared: fx.Node | None, dropout: float) -> None:
        self.chain, self.output, self.shared, self.dropout = chain, output, shared, dropout

    @classmethod
    def below(
        cls, anchor: fx.Node, scores: ScoreWalk, readers: Callable[[fx.Node], list[fx.Node]]
    ) -> _Weights:
        """Walk down.

        Raises:
            NotThisFormError: the weights do not end in a product with values, or are changed on the way.
        """
        chain, shared, dropout, cut = [anchor], None, 0.0, scores.sink is None
        while True:
            node, users = chain[-1], readers(chain[-1])
            onward = [user for user in users if _leads_on(user, node, readers)]
            if not onward:
                reader = f"they are read by {users[0].name}" if users else "nobody reads them"
                raise NotThisFormError("its weights meet no values: {}", reader)
            if len(users) > 1:
                shared = shared or node
            user = onward[0]
            if is_product(user):
                if not cut:
                    raise NotThisFormError("{} reads the weights with their sink", user.name)
                return cls(chain[1:], user, shared, dropout)
            if user.target in DROPOUTS:
                dropout = float(number(user.args[1]) or 0.0) if user.args[2] else 0.0
            if user.target is aten.slice.Tensor and not cut:
                _check_slice(user, scores)
                cut = True
            elif user.target in RESHAPES and not same_shape(
                tensor_of(user).shape[-2:], tensor_of(node).shape[-2:]
            ):
                raise NotThisFormError("{} re-arranges the weights' rows or columns", user.name)
            chain.append(user)


def _leads_on(user: fx.Node, node: fx.Node, readers: Callable[[fx.Node], list[fx.Node]]) -> bool:
    """Whether a reader of the weights is the product with v, or leads there."""
    if is_product(user):
        first = user.args[1][0] if user.target is aten.einsum.default else user.args[0]  # type: ignore[index]
        return first is node and user.target is not aten.baddbmm.default
    moving = user.target in CASTS | COPIES | RESHAPES | DROPOUTS or graphs.moves_nothing(user)
    if not (moving or user.target is aten.slice.Tensor) or source_of(user) is not node:
        return False
    return any(_leads_on(further, user, readers) for further in readers(user))


def _check_slice(node: fx.Node, scores: ScoreWalk) -> None:
    """The slice that drops the sink's column drops just that."""
    before, after = tensor_of(source_of(node) or node), tensor_of(node)
    start = argument(node, 2, "start") or 0
    whole = argument(node, 1, "dim", 0) in (-1, before.ndim - 1) and same(
        after.shape[-1] + 1, before.shape[-1]
    )
    if not whole or number(start) != (1.0 if scores.sink_first else 0.0):
        raise NotThisFormError("{} takes another part of the weights than those of the keys", node.name)


def _assemble(
    anchor: fx.Node, scores: ScoreWalk, down: _Weights, inner: tuple[fx.Node, ...]
) -> AttentionMatch:
    first, last = scores.product, MatchedProduct.of(down.output)
    heads, frame = scores.heads, Frame(sizes=first.lead, given=first.lead)
    if last.left_axes is not None:
        raise NotThisFormError("{} reads the weights with their axes in another order", down.output.name)
    later = Frame(sizes=last.lead, given=last.lead)

    def side(
        node: fx.Node,
        axes: tuple[int, ...] | None,
        where: Frame,
        *,
        swapped: bool,
        scalable: bool,
        group: bool = True,
    ) -> Any:
        if axes is None:
            return operand(node, heads, where, swapped=swapped, scalable=scalable, group=group)
        value = ordered(Operand.of(node), axes)
        return heads.split(value.then(aten.transpose.int, -2, -1) if swapped else value, where), 1.0

    q, q_scale = side(first.left, first.left_axes, frame, swapped=False, scalable=True)
    key = (first.right, first.right_axes, frame)
    value = (last.right, last.right_axes, later)
    k, k_scale = side(*key, swapped=not first.right_rows, scalable=True)
    v, _ = side(*value, swapped=last.right_rows, scalable=False)
    whole_k, _ = side(*key, swapped=not first.right_rows, scalable=True, group=False)
    whole_v, _ = side(*value, swapped=last.right_rows, scalable=False, group=False)
    for target, factor in scores.row_factors:
        q = q.then(target, factor)
    q, k, v = _agreeing(q, k, v, [whole_k, whole_v])
    return AttentionMatch(
        site=module_path(down.output), anchor=anchor, q=q, k=k, v=v,
        scale=scores.whole_scale * q_scale * k_scale, softcap=scores.softcap, edits=tuple(scores.edits),
        sink=scores.sink, dropout=down.dropout, weights=down.shared, output=down.output,
        inner=(*dict.fromkeys(inner), down.output), restore=_back(heads, down.output, v, last),
    )  # fmt: skip


def _agreeing(q: Operand, k: Operand, v: Operand, whole: list[Operand]) -> list[Operand]:
    """q, k and v of one dtype and batch, k and v with equally many heads; `whole`: k and v as they are
    repeated in the graph.
    """
    if not same(k.shape[1], v.shape[1]):
        k, v = whole
    heads = q.shape[1]
    if (
        not same(k.shape[1], v.shape[1])
        or not (isinstance(heads, int) and isinstance(k.shape[1], int))
        or heads % k.shape[1]
    ):
        raise NotThisFormError(
            "it has {} heads of queries, {} of keys and {} of values", heads, k.shape[1], v.shape[1]
        )
    q, k, v = one_dtype([q, k, v])
    if not q.val.is_floating_point():
        raise NotThisFormError("its operands are {}", q.val.dtype)
    return [q, with_batch(k, q), with_batch(v, q)]


def _back(heads: Heads, output: fx.Node, v: Operand, product: MatchedProduct | None) -> tuple[AxisStep, ...]:
    """From [B, H, S, V] to the output as the graph has it."""
    val = tensor_of(output)
    if product is not None and product.out_axes is not None:
        steps = (
            *heads.restore_lead(Frame(sizes=product.lead, given=product.lead)),
            *permuted(product.out_axes),
        )
    else:
        steps = heads.restore(output)
    return steps if v.val.dtype == val.dtype else (*steps, AxisStep(aten.to.dtype, (val.dtype,)))


def operands_of(found: AttentionMatch) -> list[Operand]:
    """Every value of the graph that the normal form reads."""
    values = [found.q, found.k, found.v, *(edit.value for edit in found.edits)]
    return values if found.sink is None else [*values, found.sink]
