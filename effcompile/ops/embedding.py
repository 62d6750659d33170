"""The gradient of an embedding, added to a gradient that is already there: for a table with several uses
(tied weights).

aten makes the embedding's gradient whole, (V, D), mostly zeros, and adds it to the other one in a third
tensor. Here only the rows that occurred are touched.

Legend: table's gradient dW (V, D), incoming gradient (..., D), indices (...), N their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effcompile.core.errors import UsageError

__all__ = ["embedding_backward_into", "workspace_bytes"]

_NAME = "effcompile::embedding_backward_into"


@torch.library.custom_op(_NAME, mutates_args=("grad_weight",))
def embedding_backward_into(
    grad_weight: Tensor, grad: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> None:
    """dW += the gradient of `embedding(W, indices)`, in place.

    Rows of `padding_idx` (−1: none) get nothing. With `scale_grad_by_freq` each is divided by how often its
    index occurs. In fp32 and fp64 the rows are added one by one: equal to aten's sum up to its order (on
    CUDA, the order of atomics). In narrower dtypes rows of one index are first summed in fp32, so that many
    small ones are not lost against a large dW. Raises UsageError when the shapes do not fit.
    """
    if grad_weight.dim() != 2 or grad.shape != (*indices.shape, grad_weight.shape[1]):
        shapes = (
            f"dW {tuple(grad_weight.shape)}, gradient {tuple(grad.shape)}, indices {tuple(indices.shape)}"
        )
        raise UsageError(
            f"embedding_backward_into takes dW (V, D), a gradient (..., D) and indices (...); given {shapes}."
        )
    index_N, grad_ND = indices.reshape(-1), grad.reshape(-1, grad_weight.shape[1])  # noqa: N806
    if scale_grad_by_freq:
        counts = grad.new_zeros(grad_weight.shape[0], dtype=torch.float32)
        counts.index_add_(0, index_N, torch.ones_like(index_N, dtype=torch.float32))
        grad_ND = (grad_ND / counts[index_N].unsqueeze_(1)).to(grad.dtype)  # noqa: N806
    if grad.dtype not in (torch.float32, torch.float64):
        grad_ND = _summed_by_index(grad_ND, index_N, grad_weight.shape[0])  # noqa: N806
    spared = grad_weight[padding_idx].clone() if padding_idx >= 0 else None
    grad_weight.index_add_(0, index_N, grad_ND)
    if spared is not None:
        grad_weight[padding_idx].copy_(spared)


@embedding_backward_into.register_fake
def _(grad_weight, grad, indices, padding_idx, scale_grad_by_freq):  # type: ignore[no-untyped-def]
    return None


def _summed_by_index(grad_ND: Tensor, index_N: Tensor, rows: int) -> Tensor:  # noqa: N803
    """(N, D): the sum, in fp32, of all rows of one index where the index occurs first, zeros elsewhere; in
    the dtype given.

    No shape depends on data, so that nothing waits for the device.
    """
    n = index_N.shape[0]
    first_V = index_N.new_full((rows,), n)  # noqa: N806
    first_V.scatter_reduce_(0, index_N, torch.arange(n, device=index_N.device), "amin")
    sums = grad_ND.new_zeros(grad_ND.shape, dtype=torch.float32)
    sums.index_add_(0, first_V[index_N], grad_ND.float())
    return sums.to(grad_ND.dtype)


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside `embedding_backward_into`, beyond its arguments; None for
    other operators.

    `name` and `args` as in `effcompile.ops.loss_head_workspace.workspace_bytes`. Contiguous fp32 without
    padding: nothing.
    """
    if name != _NAME:
        return None
    table, grad, indices, padding_idx, scaled = args
    assert (
        isinstance(table, Tensor)
        and isinstance(grad, Tensor)
        and isinstance(indices, Tensor)
        and isinstance(padding_idx, int)
    )
    v, n, e = int(table.shape[0]), int(indices.numel()), grad.element_size()
    rows = n * int(table.shape[1])
    spared = e * int(table.shape[1]) if padding_idx >= 0 else 0
    # of the gradient, as (N, D); scaled, it is gone when the quotient is made
    copy = 0 if grad.is_contiguous() else rows * e
    held = (0 if indices.is_contiguous() else n * 8) + (v * 4 if scaled else copy)
    given = rows * e if scaled else 0
    instants = [given + spared] if e >= 4 else [rows * e + spared]
    if e < 4:  # first, arange; first, its rows, sums, the gradient in fp32; first, sums, the result
        instants += [
            given + v * 8 + n * 8,
            given + v * 8 + n * 8 + 2 * rows * 4,
            given + v * 8 + rows * (4 + e),
        ]
    if scaled:  # ones in counting; the counts of the rows and the quotient in fp32, then narrowed
        instants += [
            copy + n * 4,
            copy + n * 8,
            copy + n * 4 + rows * 4,
            copy + rows * (4 + e) if e < 4 else 0,
        ]
    return held + max(instants)
