"""The loss head on tiled kernels: `effcompile::loss_head_forward`, `_backward` and `_gradients` for a device,
once registered.

The forward stores no logits at all. The backward makes the slopes of one chunk of rows at a time, in x's
dtype, with the softmax in the product's epilogue, and leaves the two products with them to the vendor's
library. `gradients`, which does no product twice, leaves all three to it, and turns a chunk's logits into
slopes in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from effcompile.backends.triton.configs import interpreting
from effcompile.backends.triton.kernels.loss_head import (
    loss_head_gradients_kernel,
    loss_head_rows,
    loss_head_slopes,
)
from effcompile.backends.triton.layout import by_rows, cdiv, next_power_of_2, on
from effcompile.backends.triton.places import runs
from effcompile.ops import loss_head as op
from effcompile.ops.loss_head import MEAN, chunk_rows, row_slices

__all__ = ["backward", "forward", "gradients", "register"]

#: Programs that keep a large GPU busy: the vocabulary is split until there are so many.
_PROGRAMS = 264
#: Words that one program of `gradients` reads at a time.
_SPAN = 4096


def register(device: str) -> None:
    """Run the loss head on the tiled kernels on this type of device."""
    op.loss_head_forward.register_kernel(device)(forward)
    op.loss_head_backward.register_kernel(device)(backward)
    op.loss_head_gradients.register_kernel(device)(gradients)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *plain: Any
) -> tuple[Tensor, Tensor]:
    """(loss, lse (N, 1)), see `effcompile.ops.loss_head.loss_head_forward`."""
    head = op.Head(x, weight, bias, target, *plain).checked()
    if not _takes(x):
        return op.forward_by_chunks(head)
    head = replace(head, x=by_rows(x), weight=by_rows(weight))
    rows, words = x.shape[0], weight.shape[0]
    arguments, launch = _arguments(head)
    block_m, block_n = arguments["BLOCK_M"], arguments["BLOCK_N"]
    tiles = cdiv(words, block_n)
    part = cdiv(tiles, max(1, min(tiles, _PROGRAMS // cdiv(rows, block_m)))) * block_n
    parts = cdiv(words, part)
    tops, totals, picks = (x.new_empty((parts, rows), dtype=torch.float32) for _ in range(3))
    with on(x):
        loss_head_rows[(cdiv(rows, block_m), parts)](
            target=target.contiguous(),
            tops=tops,
            totals=totals,
            picks=picks,
            rows=rows,
            part=part,
            **arguments,
            **launch,
        )
    lse = torch.logsumexp(tops + totals.log(), 0)
    return _outcome(head, lse - picks.sum(0)), lse.unsqueeze(1)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, *plain: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dW, dbias), see `effcompile.ops.loss_head.loss_head_backward`."""
    *form, needs = plain
    head = op.Head(x, weight, bias, target, *form).checked()
    if not _takes(x):
        return op.backward_by_chunks(head, grad, lse, needs)
    factor = _factor(head, grad)
    dx, dw, db = _sums(x, weight, bias, needs)  # dW in the weight's own strides
    x, weight = by_rows(x), by_rows(weight)
    arguments, launch = _arguments(replace(head, x=x, weight=weight))
    slopes = x.new_empty((chunk_rows(x.shape[0], head.chunks), weight.shape[0]))
    for span in row_slices(x.shape[0], head.chunks):
        _slopes(arguments, launch, x[span], target[span], lse[span], factor[span], slopes)
        _add(slopes[: span.stop - span.start], x[span], weight, dx, dw, db, span)
    return _results(x, bias, dx, dw, db)


def gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *plain: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dW, dbias), see `effcompile.ops.loss_head.loss_head_gradients`."""
    *form, needs = plain
    target = target.contiguous()
    head = op.Head(x, weight, bias, target, *form).checked()
    if not _takes(x):
        return op.gradients_by_chunks(head, needs)
    factor, losses = (
        _factor(head, x.new_ones((), dtype=torch.float32)),
        x.new_empty(len(x), dtype=torch.float32),
    )
    dx, dw, db = _sums(x, weight, bias, needs)
    words = weight.shape[0]
    slopes = x.new_empty((chunk_rows(x.shape[0], head.chunks), words))
    exact, block, outer = (
        x.dtype == torch.float32,
        min(_SPAN, next_power_of_2(words)),
        head.outer if head.capped else None,
    )
    for span in row_slices(x.shape[0], head.chunks):
        z = slopes[: span.stop - span.start]
        torch.mm(x[span], weight.t(), out=z) if bias is None else torch.addmm(
            bias, x[span], weight.t(), out=z
        )
        with on(x):
            loss_head_gradients_kernel[(len(z),)](
                z, target[span], factor[span], losses[span], words, head.inner, outer, exact, block,
                num_warps=8
            )  # fmt: skip
        _add(z, x[span], weight, dx, dw, db, span)
    return _outcome(head, losses), *_results(x, bias, dx, dw, db)


def _takes(x: Tensor) -> bool:
    return x.dtype != torch.float64 and x.numel() > 0 and runs("loss_head", x.device)


def _outcome(head: op.Head, losses: Tensor) -> Tensor:
    """Sum or mean of the rows' losses, (N), over those that are not ignored."""
    ignored = head.target == head.ignore_index
    loss = losses.masked_fill(ignored, 0.0).sum()
    return loss / (~ignored).sum() if head.reduction == MEAN else loss


def _factor(head: op.Head, grad: Tensor) -> Tensor:
    """d (the outcome's) loss / d a row's loss, (N) in fp32."""
    ignored = head.target == head.ignore_index
    scale = grad / (~ignored).sum().clamp(min=1) if head.reduction == MEAN else grad
    return scale.float().expand(head.target.shape).masked_fill(ignored, 0.0).contiguous()


def _sums(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for the wanted gradients; that of the bias is summed in fp32."""
    return (
        x.new_empty(x.shape) if needs[0] else None,
        torch.empty_like(weight) if needs[1] else None,
        x.new_zeros(weight.shape[:1], dtype=torch.float32) if needs[2] and bias is not None else None,
    )


def _results(
    x: Tensor, bias: Tensor | None, dx: Tensor | None, dw: Tensor | None, db: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As the operators return them: empty tensors where None."""
    found = (dx, dw, None if db is None or bias is None else db.to(bias.dtype))
    dx, dw, db = (x.new_empty(0) if t is None else t for t in found)
    return dx, dw, db


def _slopes(
    arguments: dict[str, Any],
    launch: dict[str, int],
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    slopes: Tensor,
) -> None:
    """d loss / d z of these rows, into the first rows of `slopes`."""
    rows, words = x.shape[0], slopes.shape[1]
    grid = (cdiv(rows, arguments["BLOCK_M"]) * cdiv(words, arguments["BLOCK_N"]),)
    with on(x):
        loss_head_slopes[grid](
            target=target.contiguous(),
            lse=lse.contiguous(),
            factor=factor,
            slopes=slopes,
            rows=rows,
            **{**arguments, "x": x},
            **launch,
        )


def _add(
    slopes: Tensor,
    x: Tensor,
    weight: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    span: slice,
) -> None:
    """What these rows add to the gradients."""
    if dx is not None:
        torch.mm(slopes, weight, out=dx[span])
    if dw is not None and span.start == 0:
        torch.mm(slopes.t(), x, out=dw)
    elif dw is not None:
        dw.addmm_(slopes.t(), x)
    if db is not None:
        db += slopes.sum(0, dtype=torch.float32)


def _arguments(head: op.Head) -> tuple[dict[str, Any], dict[str, int]]:
    """(arguments of both kernels, options of a launch). x and weight are as `by_rows` leaves them."""
    x, weight = head.x, head.weight
    wide = x.dtype == torch.float32
    block = (32, 32, 32) if interpreting() else (64, 64, 32) if wide else (128, 128, 64)
    precision = None if not wide else "ieee" if interpreting() or torch.version.hip else "tf32x3"
    arguments = {
        "x": x, "weight": weight, "bias": head.bias, "words": weight.shape[0], "width": x.shape[1],
        "x_stride": x.stride(0), "w_stride": weight.stride(0), "inner": head.inner,
        "outer": head.outer if head.capped else None, "BLOCK_M": block[0], "BLOCK_N": block[1],
        "BLOCK_K": block[2], "PRECISION": precision,
    }  # fmt: skip
    return arguments, {"num_warps": 8, "num_stages": 2 if torch.version.hip else 3, "enable_fp_fusion": True}
