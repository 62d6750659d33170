"""Finding the loss head in a joint graph: matrix product → (scale, softcap, views, casts) → log softmax →
nll_loss, and its backward.

The forward is followed upwards from nll_loss, one operator at a time; all that changes rows, values or
precision is noted. The backward is what nll_loss_backward reaches through operators that undo those steps, up
to the matrix products that make the gradients. Autograd built it from the forward, so it needs no check of
its own but one: nobody else reads what lies between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from effcompile.core.reasons import Reason
from effcompile.ir.program import dtype_of, module_path, shape_of
from effcompile.ir.step import Step
from effcompile.passes.training.step_edit import Refusal, operator_name, viewed

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default)
_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_OVER = (aten.div.Tensor, aten.div.Scalar)
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
_CHECKS = (aten._assert_tensor_metadata.default,)
#: What may stand between nll_loss_backward and the matrix products of the gradients.
_BACKWARD = (
    *_VIEWS, *_SAME, *_TIMES, *_OVER, aten.t.default, aten._log_softmax_backward_data.default,
    aten._to_copy.default, aten.tanh_backward.default, aten.slice_backward.default,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadLogits:
    """The forward part: logits = outer · tanh(inner · z) if capped, else inner · z, with z = x Wᵀ + bias.

    Attributes:
        product: the matrix product. x: its input, (N, D).
        weight: (V, D), or (D, V) when not `turned`. bias: (V) or None.
        rows: what happens to the rows between product and softmax, in forward order: views and slices.
        between: all nodes from the product, included, to the softmax, excluded.
    """

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    turned: bool
    bias: fx.Node | None
    rows: tuple[fx.Node, ...]
    inner: float
    outer: float
    capped: bool
    between: frozenset[fx.Node]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A loss head: the nodes around it and inside.

    Attributes:
        target: the labels, one per row of the softmax. reduction, ignore_index: nll_loss's.
        loss: the loss, as nll_loss returns it. grad: the gradient that arrives there.
        gradients: "x", "weight", "bias" → (the node that makes this gradient, whether it is transposed).
        inside: all nodes that the rewrite makes superfluous, matrix products and nll_loss included.
    """

    logits: HeadLogits
    target: fx.Node
    reduction: int
    ignore_index: int
    loss: fx.Node
    grad: fx.Node
    gradients: dict[str, tuple[fx.Node, bool]] = field(default_factory=dict)
    inside: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftWhole:
    """A cross entropy whose head cannot, or need not, be computed in chunks, and why."""

    site: str
    reason: Reason


def matches(step: Step) -> Iterator[Match | LeftWhole]:
    """Every cross entropy of the step: a match, or why it is none."""
    for kind in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        for nll in step.graph.find_nodes(op="call_function", target=kind):
            try:
                yield _match(nll)
            except Refusal as refusal:
                yield LeftWhole(site=module_path(nll) or step.name, reason=refusal.reason)


def _match(nll: fx.Node) -> Match:
    if nll.target is aten.nll_loss2d_forward.default:
        raise Refusal(
            "its classes are not on the last axis (nll_loss2d); flatten the logits to (rows, classes) first"
        )
    log_probabilities, target, weights, reduction, ignore_index = nll.args
    if weights is not None:
        raise Refusal("its classes are weighted")
    if reduction not in (1, 2):
        raise Refusal("its losses are kept per row (reduction='none')")
    softmax = _through(log_probabilities, _SAME)
    if (
        softmax.target is not aten._log_softmax.default
        or len(shape_of(softmax)) != 2
        or softmax.args[1] not in (-1, 1)
    ):
        raise Refusal(
            "its log-probabilities come from {}, not from a log softmax of (rows, classes) over the classes",
            operator_name(softmax),
        )
    logits, backward = _upwards(softmax), _backward_of(nll)
    loss, grad = _parts(nll, backward)
    found = Match(
        logits=logits,
        target=target,  # type: ignore[arg-type]
        reduction=reduction,  # type: ignore[arg-type]
        ignore_index=ignore_index,  # type: ignore[arg-type]
        loss=loss,
        grad=grad,
        inside={softmax, nll, *nll.users, *logits.between},
    )
    stranger = _downwards(found, backward)
    _closed(found, softmax)
    if stranger is not None:
        raise Refusal("the gradient of its logits is also read by {}", operator_name(stranger))
    if not found.gradients:
        raise Refusal("no gradient flows through it")
    return found


def _parts(nll: fx.Node, backward: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The loss and the gradient that arrives there; the sum of weights beside the loss is for the backward
    alone.
    """
    parts = {user.args[1]: user for user in nll.users if user.target is operator.getitem}
    if 1 in parts and set(parts[1].users) != {backward}:
        raise Refusal("the number of its labels is read elsewhere")
    if 0 not in parts:
        raise Refusal("its loss is not read")
    return parts[0], backward.args[0]  # type: ignore[return-value]


def _backward_of(nll: fx.Node) -> fx.Node:
    for getitem in nll.users:
        for user in getitem.users:
            if user.target is aten.nll_loss_backward.default and getitem.args[1] == 1:
                return user
    raise Refusal("no gradient flows through it")


def _through(node: Any, kinds: tuple[Any, ...]) -> fx.Node:
    while node.op == "call_function" and node.target in kinds:
        node = node.args[0]
    return node


def _upwards(softmax: fx.Node) -> HeadLogits:
    """From the softmax to the matrix product, noting what lies between."""
    classes = shape_of(softmax)[-1]
    node: fx.Node = softmax.args[0]  # type: ignore[assignment]
    between, rows, bias, scales = set[fx.Node](), list[fx.Node](), None, [1.0]
    while node.target not in (aten.mm.default, aten.addmm.default):
        between.add(node)
        source = node.args[0] if node.args else None
        if bias is not None and node.target not in (*_VIEWS, *_SAME):
            raise Refusal("{} stands between its matrix product and its bias", operator_name(node))
        if node.target in _VIEWS or node.target is aten.slice.Tensor:
            rows.insert(0, _row_step(node, classes))
        elif node.target is aten.tanh.default and len(scales) == 1:
            scales.append(1.0)
        elif node.target in (*_TIMES, *_OVER):
            scales[-1] *= _scalar(node)
        elif node.target is aten.add.Tensor:
            source, bias = _bias(node, classes)
        elif node.target is aten._to_copy.default:
            _check_cast(node)
        elif node.target not in _SAME:
            raise Refusal("{} stands between its matrix product and its softmax", operator_name(node))
        node = source  # type: ignore[assignment]
    x, weight, bias = _factors(node, bias)
    turned, capped = weight.target in _TURNS, len(scales) == 2
    return HeadLogits(
        product=node,
        x=x,
        weight=weight.args[0] if turned else weight,  # type: ignore[arg-type]
        turned=turned,
        bias=bias,
        rows=tuple(rows),
        inner=scales[-1],
        outer=scales[0] if capped else 1.0,
        capped=capped,
        between=frozenset({node, *between}),
    )


def _factors(product: fx.Node, bias: fx.Node | None) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """(x, transposed weight, bias) of mm or addmm."""
    args: list[Any] = list(product.args)
    if product.target is aten.addmm.default:
        own = args.pop(0)
        if bias is not None or len(shape_of(own)) != 1 or product.kwargs:
            raise Refusal("its matrix product adds more than a bias (V)")
        bias = own
    return args[0], args[1], bias


def _row_step(node: fx.Node, classes: int) -> fx.Node:
    """The node, when it leaves the last axis as it is."""
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    if before[-1] != classes or after[-1] != classes:
        raise Refusal(
            "the axis of its {} classes is {} after the product",
            classes,
            "cut" if node.target is aten.slice.Tensor else "reshaped",
        )
    return node


def _scalar(node: fx.Node) -> float:
    """What the node multiplies by."""
    by = node.args[1]
    if not isinstance(by, (int, float)) or not by or node.kwargs:
        raise Refusal(
            "its logits are scaled by {} ({})", "zero" if by == 0 else "a tensor", operator_name(node)
        )
    return 1.0 / by if node.target in _OVER else float(by)


def _bias(node: fx.Node, classes: int) -> tuple[fx.Node, fx.Node]:
    """(the logits without bias, the bias) of an addition."""
    logits, bias = node.args[:2]
    if node.kwargs or not isinstance(bias, fx.Node) or shape_of(bias) != (classes,):
        raise Refusal("{} stands between its matrix product and its softmax", operator_name(node))
    if dtype_of(bias) != dtype_of(logits):  # type: ignore[arg-type]
        raise Refusal("its bias has another dtype than its product")
    return logits, bias  # type: ignore[return-value]


def _check_cast(node: fx.Node) -> None:
    if dtype_of(node) not in (torch.float32, torch.float64) or torch.float64 in (
        dtype_of(node),
        dtype_of(node.args[0]),  # type: ignore[arg-type]
    ):
        raise Refusal("its logits are cast to {} before the softmax", dtype_of(node))


def _downwards(found: Match, backward: fx.Node) -> fx.Node | None:
    """From nll_loss_backward to the gradients of x, weight and bias.

    Returns a node on the way that is none of that, if any.
    """
    turned, waiting = {backward: False}, [backward]
    stranger = None
    while waiting:
        node = waiting.pop()
        found.inside.add(node)
        for user in node.users:
            if _passes_on(user):
                turned[user] = turned[node] != (user.target is aten.t.default)
                waiting.append(user)
            elif not _is_gradient(found, user, node, turned):
                stranger = user
    return stranger


def _passes_on(node: fx.Node) -> bool:
    """True for a step of the way back that changes the gradient of the logits into that of the product."""
    scaled = node.target in (*_TIMES, *_OVER)
    return node.target in _BACKWARD and not (scaled and isinstance(node.args[1], fx.Node))


def _is_gradient(found: Match, node: fx.Node, logits: fx.Node, turned: Mapping[fx.Node, bool]) -> bool:
    """True, and noted, for a node that makes the gradient of x, weight or bias from the logits' gradient."""
    axes = len(shape_of(logits))
    if node.target is aten.sum.dim_IntList:
        summed: Any = node.args[1]
        name, flipped = "bias", False
        right = (
            found.logits.bias is not None
            and not turned[logits]
            and sorted(a % axes for a in summed) == list(range(axes - 1))
        )
    elif node.target is aten.mm.default:
        first = node.args[0] is logits
        other: fx.Node = node.args[1 if first else 0]  # type: ignore[assignment]
        name = "x" if first != turned[logits] else "weight"
        flipped = turned[logits] if name == "x" else not turned[logits]
        right = viewed(other) is viewed(found.logits.x if name == "weight" else found.logits.weight)
    else:
        return False
    if right and name not in found.gradients:
        found.gradients[name] = (node, flipped)
        found.inside.add(node)
        return True
    return False


def _closed(found: Match, softmax: fx.Node) -> None:
    """Nobody outside reads what is inside, but the loss and the gradients."""
    ends = {found.loss, *(node for node, _ in found.gradients.values())}
    waiting = [node for node in found.inside if node not in ends]
    readers = dict[fx.Node, fx.Node]()
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in found.inside:
                continue
            if user.target in (*_CHECKS, *_SAME, *_VIEWS):
                found.inside.add(user)
                waiting.append(user)
            else:
                readers[user] = node
    if readers:
        raise Refusal("{}", _reading(readers, softmax))


def _reading(readers: Mapping[fx.Node, fx.Node], softmax: fx.Node) -> str:
    """Who reads what, for the first reader in graph order; an output before all."""
    if any(user.op == "output" for user in readers):
        return "its logits are kept as an output"
    order = {node: i for i, node in enumerate(softmax.graph.nodes)}
    user = min(readers, key=order.__getitem__)
    if viewed(readers[user]) is softmax:
        return f"its log-probabilities are also read by {operator_name(user)} (label smoothing?)"
    return f"its logits are also read by {operator_name(user)}"
