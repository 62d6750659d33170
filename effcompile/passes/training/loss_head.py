"""The loss head as a planned block: cross entropy over chunks of rows instead of whole logits.

At GPT-2's size (b2 s512, vocabulary 50257, fp32) logits, log-probabilities and their gradient are 206 MB
each, and three are there at once: the highest instant of a step that checkpoints its blocks. The operators
are `effcompile.ops.loss_head`'s.

Options:

- "whole": as captured. 3 (N, V) tensors at the highest instant, one of them kept from forward to backward.
- "chunked": (R, V) logits at a time, R = ceil(N / chunks), and the gradients of x (N, D), weight and bias are
  made in the forward and kept; the backward multiplies them, in place, by the gradient that arrives at the
  loss. No extra operations. Such a backward runs once per forward.
- "rechunked": (R, V) logits at a time, in the forward and again in the backward; N numbers are kept. One
  matrix product twice: 2·N·D·V operations more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

import effcompile.ops.loss_head  # noqa: F401  registers the operators
from effcompile.core.errors import UsageError
from effcompile.core.reasons import Unsupported
from effcompile.core.types import Args, Value
from effcompile.ir.program import dtype_of, module_path, shape_of
from effcompile.ir.step import Step
from effcompile.ops.scaled import scale_
from effcompile.passes.training.accumulate import accumulate_embeddings
from effcompile.passes.training.loss_head_match import LeftWhole, Match, matches
from effcompile.passes.training.step_edit import call, copied, operator_name

__all__ = [
    "OPTIONS",
    "LossHead",
    "accumulate_embeddings",
    "declined_loss_heads",
    "find_loss_heads",
    "with_loss_head",
]

aten, ours = torch.ops.aten, torch.ops.effcompile

OPTIONS = ("whole", "chunked", "rechunked")
#: Fewer rows than this per chunk, and the matrix products no longer fill a machine.
_LEAST_ROWS = 32
_GRADIENTS = ("x", "weight", "bias")


@dataclass(frozen=True, kw_only=True)
class LossHead:
    """A linear and its cross entropy that can be computed in chunks.

    Attributes:
        site: qualified name of the module that makes the logits.
        rows, classes, width: N, V, D.
        logits_bytes: of the whole logits in the softmax's precision.
        options: those of OPTIONS that are exact here.
        chunk_counts: the numbers of chunks to choose from; each has 32 rows or more per chunk.
        wanted: the gradients that the step needs: "x", "weight", "bias".
        match: the nodes. They belong to the step in which the head was found.
    """

    site: str
    rows: int
    classes: int
    width: int
    logits_bytes: int
    options: tuple[str, ...]
    chunk_counts: tuple[int, ...]
    wanted: tuple[str, ...]
    match: Match


def find_loss_heads(step: Step) -> list[LossHead]:
    """The loss heads that can be computed in chunks, in graph order."""
    return [found for found in _inspected(step) if isinstance(found, LossHead)]


def declined_loss_heads(step: Step) -> list[LeftWhole]:
    """The cross entropies that cannot, or need not, with the reason."""
    return [found for found in _inspected(step) if isinstance(found, LeftWhole)]


def with_loss_head(step: Step, head: LossHead, option: str, chunks: int) -> Step:
    """A copy of the step whose loss head is computed as `option` says; the step itself for "whole".

    Equal to the original up to the order of sums (in bf16 the weight's gradient is rounded once per chunk).

    Args:
        step: is not changed.
        head: from `find_loss_heads(step)`.
        option: one of `head.options`.
        chunks: one of `head.chunk_counts`; of no meaning for "whole".

    Raises:
        UsageError: another option or number of chunks, or a head of another step.
    """
    if option not in head.options:
        raise UsageError(
            f"The loss head {head.site} has no option {option!r}. Its options: {', '.join(head.options)}."
        )
    if head.match.loss.graph is not step.graph:
        raise UsageError(
            f"The loss head {head.site} was found in another step. Find it in this one: "
            "find_loss_heads(step)."
        )
    if option == "whole":
        return step
    if chunks not in head.chunk_counts:
        allowed = ", ".join(map(str, head.chunk_counts))
        raise UsageError(
            f"The loss head {head.site} of {head.rows} rows takes {allowed} chunks; given {chunks}."
        )
    copy, nodes = copied(step)
    _Rewrite(copy.graph, head, nodes, chunks).run(recompute=option == "rechunked")
    copy.graph.lint()
    copy.module.recompile()
    return copy


def _inspected(step: Step) -> list[LossHead | LeftWhole]:
    return [_head(found, step) if isinstance(found, Match) else found for found in matches(step)]


def _head(match: Match, step: Step) -> LossHead | LeftWhole:
    """The head, or why chunks gain nothing there."""
    logits = match.logits
    site, rows = module_path(logits.product) or step.name, shape_of(match.target)[0]
    width, classes = shape_of(logits.x)[-1], shape_of(logits.product)[-1]
    counts = tuple(2**k for k in range(1, 31) if -(-rows // 2**k) >= _LEAST_ROWS)
    if classes <= width:
        text = "its logits ({}, {}) are no larger than its input ({}, {}): nothing to gain"
        return LeftWhole(site=site, reason=Unsupported(text, (rows, classes, rows, width)))
    if not counts:
        return LeftWhole(
            site=site, reason=Unsupported("its {} rows are too few for chunks of {}", (rows, _LEAST_ROWS))
        )
    # its gradients vanish if the loss's scale is multiplied only afterwards
    half = dtype_of(logits.x) == torch.float16
    wide = 8 if dtype_of(logits.x) == torch.float64 else 4
    return LossHead(
        site=site, rows=rows, classes=classes, width=width, logits_bytes=rows * classes * wide,
        chunk_counts=counts, options=tuple(o for o in OPTIONS if not (half and o == "chunked")),
        wanted=tuple(name for name in _GRADIENTS if name in match.gradients), match=match,
    )  # fmt: skip


class _Rewrite:
    """Puts the operators in the place of a head, in a copied graph."""

    def __init__(self, graph: fx.Graph, head: LossHead, nodes: dict[fx.Node, fx.Node], chunks: int) -> None:
        self.graph, self.head, self.nodes, self.chunks = graph, head, nodes, chunks
        self.match, self.logits = head.match, head.match.logits
        self.product = nodes[self.logits.product]

    def run(self, *, recompute: bool) -> None:
        loss, grad = self.nodes[self.match.loss], self.nodes[self.match.grad]
        needs = [name in self.head.wanted for name in _GRADIENTS]
        with self.graph.inserting_before(loss):
            operands, form = self._operands(), self._form()
            if recompute:
                made = self._call(ours.loss_head_forward.default, *operands, *form)
                lse = self._item(made, 1)
            else:
                made = self._call(ours.loss_head_gradients.default, *operands, *form, needs)
            loss.replace_all_uses_with(self._cast(self._item(made, 0), loss))
        first = min(self.match.gradients.values(), key=lambda end: self._place(end[0]))[0]
        if recompute:
            with self.graph.inserting_before(self.nodes[first]):
                origin, kernel = self.nodes[first], ours.loss_head_backward.default
                made = call(self.graph, origin, kernel, grad, *operands, lse, *form, needs)
        for name in self.head.wanted:
            index = _GRADIENTS.index(name) + (0 if recompute else 1)
            self._gradient(name, made, index, None if recompute else grad)
        self._sweep()

    def _operands(self) -> Args:
        """x (N', D), W (V, D), bias, target (N')."""
        logits, nodes = self.logits, self.nodes
        x, weight = nodes[logits.x], nodes[logits.weight]
        if self._cuts():
            for step in logits.rows:
                x = self._replayed(step, x)
            x = self._call(aten.reshape.default, x, [-1, self.head.width])
        if not logits.turned:
            weight = self._call(aten.t.default, weight)
        return x, weight, None if logits.bias is None else nodes[logits.bias], nodes[self.match.target]

    def _form(self) -> Args:
        """reduction, ignore_index, inner, outer, capped, chunks."""
        logits = self.logits
        return (
            self.match.reduction,
            self.match.ignore_index,
            logits.inner,
            logits.outer,
            logits.capped,
            self.chunks,
        )

    def _cuts(self) -> bool:
        """Whether rows are left out between product and softmax: then they are left out before
        the product.
        """
        return any(step.target is aten.slice.Tensor for step in self.logits.rows)

    def _replayed(self, step: fx.Node, x: fx.Node) -> fx.Node:
        """A view or slice of the logits' rows, of x instead."""
        if step.target is aten.slice.Tensor:
            return self._call(aten.slice.Tensor, x, *step.args[1:])
        return self._call(aten.reshape.default, x, [*shape_of(step)[:-1], self.head.width])

    def _undone(self, origin: fx.Node, grad: fx.Node) -> fx.Node:
        """The gradient (N', D) of the replayed rows to that of x, (N, D): zeros for the rows left out."""
        shapes = [
            shape_of(self.logits.x),
            *((*shape_of(step)[:-1], self.head.width) for step in self.logits.rows),
        ]
        grad = call(self.graph, origin, aten.view.default, grad, list(shapes[-1]))
        for step, before in zip(reversed(self.logits.rows), reversed(shapes[:-1]), strict=True):
            if step.target is aten.slice.Tensor:
                cut = [*step.args[1:], *_SLICE_DEFAULTS[len(step.args) - 1 :]]
                grad = call(self.graph, origin, aten.slice_backward.default, grad, list(before), *cut)
            else:
                grad = call(self.graph, origin, aten.view.default, grad, list(before))
        return grad

    def _gradient(self, name: str, made: fx.Node, index: int, scale: fx.Node | None) -> None:
        """The operator's gradient in the place of the captured one."""
        end, flipped = self.match.gradients[name]
        place = self.nodes[end]
        with self.graph.inserting_after(made):
            result = call(self.graph, self.product if scale else place, operator.getitem, made, index)
        with self.graph.inserting_before(place):
            if scale is not None:
                result = call(self.graph, place, scale_, result, scale)
            if name == "x" and self._cuts():
                result = self._undone(place, result)
            if name == "bias" and shape_of(end) != shape_of(result):
                result = call(self.graph, place, aten.view.default, result, list(shape_of(end)))
            if flipped:
                result = call(self.graph, place, aten.t.default, result)
            place.replace_all_uses_with(self._cast(result, place))

    def _cast(self, result: fx.Node, old: fx.Node) -> fx.Node:
        """The result in the dtype of the node whose place it takes."""
        if dtype_of(result) == dtype_of(old):
            return result
        return call(self.graph, old, aten._to_copy.default, result, dtype=dtype_of(old))

    def _place(self, node: fx.Node) -> int:
        return list(self.graph.nodes).index(self.nodes[node])

    def _call(self, target: Callable[..., object], *args: Value) -> fx.Node:
        return call(self.graph, self.product, target, *args)

    def _item(self, made: fx.Node, index: int) -> fx.Node:
        return self._call(operator.getitem, made, index)

    def _sweep(self) -> None:
        """Erase what the head consisted of, and views that only it read."""
        views = {
            n for node in self.match.inside for n in node.all_input_nodes if operator_name(n) in _LEFT_OVER
        }
        superfluous = {self.nodes[n] for n in self.match.inside | views}
        for node in reversed(list(self.graph.nodes)):
            if node in superfluous and not node.users:
                self.graph.erase_node(node)


#: dim, start, end, step of aten.slice when not given.
_SLICE_DEFAULTS = (0, None, None, 1)
_LEFT_OVER = ("aten.t", "aten.detach", "aten.alias", "aten.transpose.int", "aten.permute")
