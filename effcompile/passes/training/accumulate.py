"""Gradients of a parameter with several uses, summed where the first of them lies instead of in a new tensor.

Autograd makes each use's gradient whole and adds them: three tensors of the parameter's size where one is
enough. GPT-2's tied embedding, (50257, 768) in fp32, is 154 MB: of 806 MB at the highest instant of a
checkpointed step, 309 MB are these two superfluous ones (facts: b2 s512, CPU).

The rewritten node writes in place, so the graph is no longer functional there. It stands where nobody reads
the tensor between: the sum was its only reader.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import effcompile.ops.embedding  # noqa: F401  registers the operator
from effcompile.core.torch_compat_aot import writes
from effcompile.ir.step import Step
from effcompile.passes.training.step_edit import call, copied, is_whole_view, viewed

aten = torch.ops.aten

_TURNS = (aten.t.default, aten.transpose.int)


def accumulate_embeddings(step: Step) -> Step:
    """A copy of the step in which each sum of gradients of one parameter is made in the memory of one of its
    terms.

    Per sum a + b, where one term has no other reader (call it the target; the earlier of the two if both are
    free):

    - the other is an embedding's gradient → `effcompile::embedding_backward_into(target, ...)`, which returns
      nothing; those who read the sum now read the target, and stand after it. (Those with scale_grad_by_freq
      are left alone.)
    - the other, later, is a matrix product → `aten.addmm_(target, ...)`: the product is never there on its
      own.
    - anything else → `aten.add_(target, other)`.

    Sums where neither term is free stay as they are. Equal to the original up to the order of sums: in fp32
    one rounding per element and term; in narrower dtypes the product of `addmm_` is not rounded before it is
    added.
    """
    step, _ = copied(step)
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    for add in sorted(_sums(step), key=order.__getitem__):
        _accumulate(step.graph, add)
    step.graph.lint()
    step.module.recompile()
    return step


def _sums(step: Step) -> set[fx.Node]:
    """The additions between the gradients that the step returns and the operators that compute
    their terms.
    """
    found, waiting = set[fx.Node](), list(step.gradients.values())
    while waiting:
        node = viewed(waiting.pop())
        if node not in found and is_sum(node):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def is_sum(node: fx.Node) -> bool:
    """a + b of two tensors of one shape and dtype, neither scaled nor the same."""
    if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    terms = node.all_input_nodes
    if len(terms) != 2:
        return False
    values = [n.meta.get("val") for n in (node, *terms)]
    kinds = {(v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in values}
    return len(kinds) == 1 and None not in kinds


def _accumulate(graph: fx.Graph, add: fx.Node) -> None:
    """Replace `add` by a write into one of its terms, if one is free."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    terms = sorted(add.all_input_nodes, key=lambda n: order[_maker(n)])
    free = [term for term in terms if is_free(term, add)]
    for target in free:
        other = terms[1] if target is terms[0] else terms[0]
        if (
            other.target is aten.embedding_dense_backward.default
            and len(other.users) == 1
            and not other.args[4]
        ):
            _embed_into(graph, add, target, other, at=other if order[target] < order[other] else add)
            return
    if free:
        target, other = free[0], terms[1] if free[0] is terms[0] else terms[0]
        product = _product(other, add) if target is terms[0] else None
        if product is not None and order[target] < order[viewed(other)]:
            _multiply_into(graph, add, target, product, at=viewed(other))
        else:
            with graph.inserting_before(add):
                _replace(graph, add, call(graph, add, aten.add_.Tensor, target, other))


def _embed_into(graph: fx.Graph, add: fx.Node, target: fx.Node, embedding: fx.Node, *, at: fx.Node) -> None:
    grad, indices, _, padding_idx, scaled = embedding.args
    with graph.inserting_before(at):
        call(
            graph,
            embedding,
            torch.ops.effcompile.embedding_backward_into.default,
            target,
            grad,
            indices,
            padding_idx,
            scaled,
        )
    _replace(graph, add, target)


def _multiply_into(
    graph: fx.Graph, add: fx.Node, target: fx.Node, factors: tuple[Any, Any], *, at: fx.Node
) -> None:
    with graph.inserting_before(at):
        a, b = (call(graph, at, aten.t.default, f) if turned else f for f, turned in factors)
        result = call(graph, at, aten.addmm_.default, target, a, b)
    _replace(graph, add, result)


def _replace(graph: fx.Graph, add: fx.Node, result: fx.Node) -> None:
    """`result` for `add`, and without the nodes that only `add` read."""
    unread = add.all_input_nodes
    add.replace_all_uses_with(result)
    graph.erase_node(add)
    while unread:
        node = unread.pop()
        if not node.users and node.op == "call_function" and not writes(node):
            unread += node.all_input_nodes
            graph.erase_node(node)


def _product(node: fx.Node, add: fx.Node) -> tuple[tuple[fx.Node, bool], tuple[fx.Node, bool]] | None:
    """Factors a, b of node = a @ b, each with whether it is to be transposed; None for anything but a product
    only `add` reads.
    """
    turned, reader = False, add
    while True:
        if set(node.users) != {reader}:
            return None
        if node.target is aten.mm.default:
            a, b = node.args
            return ((b, True), (a, True)) if turned else ((a, False), (b, False))  # type: ignore[return-value]
        if node.target not in _TURNS or node.meta["val"].dim() != 2:
            return None
        turned, reader, node = not turned, node, node.args[0]  # type: ignore[assignment]


def is_free(term: fx.Node, add: fx.Node) -> bool:
    """True when `term` is all of a tensor of its own that only `add` still reads: it may be overwritten
    there.
    """
    node, reader = term, add
    while True:
        if any(user is not reader and not _wrote_before(user, node) for user in node.users):
            return False
        source = _source(node)
        if source is None:
            return _owns(node)
        node, reader = source, node


def _source(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node shows or wrote to, None for a node with a result of its own."""
    in_place = writes(node) and bool(node.target._schema.returns)  # type: ignore[union-attr]
    return node.args[0] if is_whole_view(node) or in_place else None  # type: ignore[return-value]


def _wrote_before(user: fx.Node, node: fx.Node) -> bool:
    """True for an operator without a result that wrote to `node`: it stands before all later readers."""
    return writes(user) and not user.target._schema.returns and user.args[0] is node  # type: ignore[union-attr]


def _maker(node: fx.Node) -> fx.Node:
    """The node that made this one's memory."""
    while (source := _source(node)) is not None:
        node = source
    return node


def _owns(node: fx.Node) -> bool:
    """True for an operator's fresh result: neither a placeholder nor a view of a part or with repeated
    elements.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _owns(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not any(_is_alias(r) for r in schema.returns)


def _is_alias(result: Any) -> bool:
    return result.alias_info is not None
