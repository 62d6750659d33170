"""The loss head, a linear and its cross entropy, over chunks of rows: the (N, V) logits are never whole.

    z = x Wᵀ + bias          logits = outer · tanh(inner · z) if capped, else inner · z
    loss = −Σ log softmax(logits)[target], over rows whose target is not ignore_index; divided by their number
    for MEAN

Two ways, both exact (the loss and all gradients, up to the order of sums):

- `loss_head_gradients`: one pass that also computes the gradients for an incoming gradient of 1, as Liger
  Kernel does (Hsu et al., arXiv 2410.10989, section 3.3). No operation is done twice; dW lives from the
  forward on.
- `loss_head_forward` keeps one number per row, the log of the softmax's denominator, and `loss_head_backward`
  computes each chunk's logits again (Wijmans et al., Cut Your Losses, arXiv 2411.09009): one of three matrix
  products twice.

Legend: x (N, D), W (V, D), bias (V), target (N) of int64, R = ceil(N / chunks) rows per chunk (the last may
be shorter, and there may be fewer chunks than asked for). Matrix products run in x's dtype, as in the model;
all else in fp32 (fp64 for fp64). dW is accumulated over the chunks in W's dtype: in bf16 every chunk rounds
it once. dbias is accumulated in fp32. A row of ignored labels gets no gradient; when all are ignored, the
mean is nan and the gradients are 0, as in PyTorch.

What is allocated beside the results: see loss_head_workspace.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.devices import one_device
from effcompile.ops.loss_rows import LossRows, row_stride, where_for
from effcompile.ops.sums import sum_dtype
from effcompile.ops.wide import product_into

__all__ = ["MEAN", "SUM", "chunk_rows", "loss_head_backward", "loss_head_forward", "loss_head_gradients"]

#: Values of `reduction`, as in aten's nll_loss.
MEAN, SUM = 1, 2


def chunk_rows(rows: int, chunks: int) -> int:
    """Rows per chunk, R: the last chunk may have fewer."""
    return -(-rows // chunks)


@dataclass(frozen=True, slots=True)
class Head:
    """The operators' arguments in their order, but for what comes from outside: a gradient, what the forward
    kept, what is wanted.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    reduction: int
    ignore_index: int
    inner: float
    outer: float
    capped: bool
    chunks: int

    @property
    def slope(self) -> float:
        """d logits / d z where that is a constant."""
        return self.inner * self.outer if self.capped else self.inner

    def checked(self) -> Head:
        """The head.

        Raises:
            UsageError: shapes, a reduction or a number of chunks that the operators do not take.
        """
        _check(self)
        return self


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_PLAIN = "SymInt reduction, SymInt ignore_index, float inner, float outer, bool capped, SymInt chunks"


def gradients_by_chunks(head: Head, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dW, dbias) in one pass.

    `needs`: which of the three gradients are wanted, in this order; others are empty tensors.
    """
    labels, gradients, chunk = _Labels(head), _Gradients(head, needs), _chunk(head, needs)
    labels.factor.mul_(head.slope)
    for rows in row_slices(head.x.shape[0], head.chunks):
        gradients.add(chunk, chunk.gradient(rows, labels), rows)
    return labels.loss().neg_(), *gradients.results()


@torch.library.custom_op(
    "effcompile::loss_head_gradients",
    mutates_args=(),
    schema=f"({_TENSORS}, {_PLAIN}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
)
def loss_head_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *plain: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dW, dbias); `plain` are the other fields of a Head, and `needs`.

    Raises:
        UsageError: shapes, a reduction or a number of chunks that it does not take.
    """
    *form, needs = plain
    return gradients_by_chunks(Head(x, weight, bias, target, *form).checked(), needs)


def forward_by_chunks(head: Head) -> tuple[Tensor, Tensor]:
    """(loss, log of the sum of exp(logits) per row as (N, 1))."""
    labels, chunk = _Labels(head), _chunk(head)
    lse = torch.empty_like(labels.picked)
    for rows in row_slices(head.x.shape[0], head.chunks):
        chunk.denominator(rows, labels, lse[rows])
    return labels.loss().neg_(), lse


@torch.library.custom_op(
    "effcompile::loss_head_forward", mutates_args=(), schema=f"({_TENSORS}, {_PLAIN}) -> (Tensor, Tensor)"
)
def loss_head_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *plain: Any
) -> tuple[Tensor, Tensor]:
    """(loss, log of the sum of exp(logits) per row as (N, 1)). Raises as `loss_head_gradients` does."""
    return forward_by_chunks(Head(x, weight, bias, target, *plain).checked())


def backward_by_chunks(
    head: Head, grad: Tensor, lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dW, dbias) for the incoming gradient `grad` of the loss, ().

    `lse` is what `loss_head_forward` returned.
    """
    labels, gradients, chunk = _Labels(head, picks=False), _Gradients(head, needs), _chunk(head, needs)
    labels.factor.mul_(head.slope).mul_(grad)
    for rows in row_slices(head.x.shape[0], head.chunks):
        gradients.add(chunk, chunk.gradient_again(rows, labels, lse[rows]), rows)
    return gradients.results()


@torch.library.custom_op(
    "effcompile::loss_head_backward", mutates_args=(),
    schema=f"(Tensor grad, {_TENSORS}, Tensor lse, {_PLAIN}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def loss_head_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, *plain: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dW, dbias) for the incoming gradient `grad` of the loss, ().

    `lse` is what `loss_head_forward` returned.
    """
    *form, needs = plain
    return backward_by_chunks(Head(x, weight, bias, target, *form).checked(), grad, lse, needs)


class _Labels:
    """What the kernels need of the labels, (N, 1) each.

    index: the label, 0 where ignored (an invalid label stays, and gather refuses it). ignored: bool. picked:
    memory for the label's log-probability. factor: d loss / d row's loss. count: how many are not ignored,
    ().
    """

    def __init__(self, head: Head, *, picks: bool = True) -> None:
        self.mean, dtype = head.reduction == MEAN, sum_dtype(head.x)
        self.ignored = head.target.eq(head.ignore_index).unsqueeze_(1)
        self.index = head.target.unsqueeze(1).masked_fill(self.ignored, 0)
        self.count = self.ignored.logical_not().sum()
        self.factor = torch.ones_like(self.index, dtype=dtype)
        if self.mean:
            self.factor.div_(self.count.clamp(min=1))
        self.factor.masked_fill_(self.ignored, 0.0)
        self.picked = torch.empty_like(self.factor) if picks else self.factor

    def loss(self) -> Tensor:
        """Sum or mean of `picked` over the rows that are not ignored, ()."""
        total = self.picked.masked_fill_(self.ignored, 0.0).sum()
        return total.div_(self.count) if self.mean else total


class _Rows(Protocol):
    """One chunk's logits, and the memory that they take, used again for each chunk.

    Gradients are d loss / d z, (R, V), and lie until the next chunk; narrow: memory (R, V) in x's dtype.
    """

    narrow: Tensor

    def gradient(self, rows: slice, labels: _Labels) -> Tensor:
        """Of rows, whose labels' log-probabilities are put into `labels.picked`."""

    def denominator(self, rows: slice, labels: _Labels, lse: Tensor) -> None:
        """Log-probabilities as above, and the log of the softmax's denominator into `lse` (R, 1)."""

    def gradient_again(self, rows: slice, labels: _Labels, lse: Tensor) -> Tensor:
        """Of rows whose denominators are known."""


def _chunk(head: Head, needs: Sequence[bool] = ()) -> _Rows:
    """By compiled kernels where there are some for it. `needs`: the gradients that are wanted, if any are."""
    bias = bool(needs) and needs[2] and head.bias is not None
    found = where_for(head.x, capped=head.capped, bias=bias)
    if found is None or head.target.dtype is not torch.int64:
        return _TorchRows(head, backward=bool(needs))
    return _CompiledRows(head, found)


class _CompiledRows:
    """By `loss_rows`: in x's dtype, in one place, rows `row_stride` apart."""

    def __init__(self, head: Head, kernels: LossRows) -> None:
        self.head, self.kernels = head, kernels
        rows, columns = chunk_rows(head.x.shape[0], head.chunks), head.weight.shape[0]
        memory = head.x.new_empty((rows, row_stride(columns, head.x.dtype)))
        # oneDNN multiplies what it reads behind a row by zero, which a NaN survives
        memory[:, columns:].zero_()
        self.narrow = memory[:, :columns]

    def gradient(self, rows: slice, labels: _Labels) -> Tensor:
        return self._run(rows, labels, factors=labels.factor[rows], picked=labels.picked[rows])

    def denominator(self, rows: slice, labels: _Labels, lse: Tensor) -> None:
        self._run(rows, labels, picked=labels.picked[rows], lse=lse)

    def gradient_again(self, rows: slice, labels: _Labels, lse: Tensor) -> Tensor:
        return self._run(rows, labels, factors=labels.factor[rows], lse=lse, given=True)

    def _run(self, rows: slice, labels: _Labels, **wanted: Any) -> Tensor:
        head, narrow = self.head, self.narrow[: rows.stop - rows.start]
        product_into(narrow, head.x[rows], head.weight.t(), bias=head.bias)
        self.kernels.run(narrow, labels.index[rows], head.inner, **wanted)
        return narrow


class _TorchRows:
    """By torch.

    tanh: (R, V), for capped logits in a backward. wide: (R, V) in the softmax's dtype, `narrow` if that is
    x's.
    """

    def __init__(self, head: Head, *, backward: bool) -> None:
        self.head = head
        shape, dtype = (chunk_rows(head.x.shape[0], head.chunks), head.weight.shape[0]), sum_dtype(head.x)
        self.wide = head.x.new_empty(shape, dtype=dtype)
        self.narrow = self.wide if dtype == head.x.dtype else head.x.new_empty(shape)
        self.tanh = head.x.new_empty(shape, dtype=dtype) if head.capped and backward else None

    def gradient(self, rows: slice, labels: _Labels) -> Tensor:
        logits = self._logits(rows)
        torch.log_softmax(logits, 1, out=logits)
        torch.gather(logits, 1, labels.index[rows], out=labels.picked[rows])
        return self._of(logits.exp_(), rows, labels)

    def denominator(self, rows: slice, labels: _Labels, lse: Tensor) -> None:
        logits, picked, sums = self._logits(rows), labels.picked[rows], labels.factor[rows]
        torch.amax(logits, 1, keepdim=True, out=lse)
        torch.gather(logits, 1, labels.index[rows], out=picked)
        # the factor is for gradients: its memory serves again
        lse.add_(torch.sum(logits.sub_(lse).exp_(), 1, keepdim=True, out=sums).log_())
        picked.sub_(lse)

    def gradient_again(self, rows: slice, labels: _Labels, lse: Tensor) -> Tensor:
        return self._of(self._logits(rows).sub_(lse).exp_(), rows, labels)

    def _logits(self, rows: slice) -> Tensor:
        """The logits of these rows, in `wide`."""
        head, size = self.head, rows.stop - rows.start
        x, wide, narrow = head.x[rows], self.wide[:size], self.narrow[:size]
        product_into(narrow, x, head.weight.t(), bias=head.bias)
        if wide.dtype != narrow.dtype:
            wide.copy_(narrow)
        if head.inner != 1.0:
            wide.mul_(head.inner)
        if head.capped:
            wide.tanh_()
            if self.tanh is not None:
                self.tanh[:size].copy_(wide)
            wide.mul_(head.outer)
        return wide

    def _of(self, probabilities: Tensor, rows: slice, labels: _Labels) -> Tensor:
        """Probabilities to d loss / d z, in place."""
        index = labels.index[rows]
        probabilities.scatter_add_(1, index, probabilities.new_full((1, 1), -1.0).expand_as(index))
        probabilities.mul_(labels.factor[rows])
        if self.tanh is not None:
            tanh = self.tanh[: index.shape[0]]
            probabilities.mul_(tanh.square_().neg_().add_(1.0))
        return probabilities


class _Gradients:
    """dx (N, D), dW (V, D) in W's strides, dbias (V), accumulated chunk by chunk; what is not
    wanted is None.
    """

    def __init__(self, head: Head, needs: Sequence[bool]) -> None:
        self.head, x, weight, bias = head, head.x, head.weight, head.bias
        self.x, self.weight, self.bias = _like(x, weight, bias, needs)
        self.bias_sum = self.row = None
        if self.bias is not None:
            self.row = x.new_empty(weight.shape[0], dtype=sum_dtype(x))
            self.bias_sum = (
                self.bias.zero_() if self.bias.dtype == self.row.dtype else torch.zeros_like(self.row)
            )

    def add(self, chunk: _Rows, gradient: Tensor, rows: slice) -> None:
        """What these rows add, from the gradient of their z."""
        if self.bias_sum is not None:
            self.bias_sum.add_(torch.sum(gradient, 0, out=self.row))
        narrow = chunk.narrow[: gradient.shape[0]]
        if narrow.dtype != gradient.dtype:
            narrow.copy_(gradient)
        if self.x is not None:
            product_into(self.x[rows], narrow, self.head.weight)
        if self.weight is not None:
            product_into(self.weight, narrow.t(), self.head.x[rows], accumulate=rows.start > 0)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dW, dbias), empty tensors where None."""
        if self.bias is not None and self.bias_sum is not self.bias:
            self.bias.copy_(self.bias_sum)  # type: ignore[arg-type]
        x, weight, bias = (
            g if g is not None else self.head.x.new_empty(0) for g in (self.x, self.weight, self.bias)
        )
        return x, weight, bias


def _like(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for the wanted gradients."""
    return (
        x.new_empty(x.shape) if needs[0] else None,
        torch.empty_like(weight) if needs[1] else None,
        torch.empty_like(bias) if needs[2] and bias is not None else None,
    )


def row_slices(rows: int, chunks: int) -> Iterator[slice]:
    """The rows of each chunk."""
    size = chunk_rows(rows, chunks)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _check(head: Head) -> None:
    x, weight, bias, target = head.x, head.weight, head.bias, head.target
    one_device("A loss head", x=x, W=weight, bias=bias, target=target)
    shapes = f"x {tuple(x.shape)}, W {tuple(weight.shape)}, target {tuple(target.shape)}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or target.shape != x.shape[:1]:
        raise UsageError(
            f"A loss head takes x (N, D), W (V, D) and target (N); given {shapes}. Flatten the batch axes "
            "first."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"A loss head's bias has shape (V); given {tuple(bias.shape)} with {shapes}.")
    if head.reduction not in (MEAN, SUM):
        raise UsageError(
            f"A loss head's reduction is {MEAN} (mean) or {SUM} (sum); given {head.reduction}. Losses per "
            "row are not computed."
        )
    if head.chunks < 1:
        raise UsageError(f"A loss head is computed in 1 chunk or more; given {head.chunks}.")


@loss_head_gradients.register_fake
def _(x, weight, bias, target, *plain):  # type: ignore[no-untyped-def]
    return x.new_empty((), dtype=sum_dtype(x)), *_fake_gradients(x, weight, bias, plain[-1])


@loss_head_forward.register_fake
def _(x, weight, bias, target, *plain):  # type: ignore[no-untyped-def]
    return x.new_empty((), dtype=sum_dtype(x)), x.new_empty((x.shape[0], 1), dtype=sum_dtype(x))


@loss_head_backward.register_fake
def _(grad, x, weight, bias, target, lse, *plain):  # type: ignore[no-untyped-def]
    return _fake_gradients(x, weight, bias, plain[-1])


def _fake_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return tuple(g if g is not None else x.new_empty(0) for g in _like(x, weight, bias, needs))
