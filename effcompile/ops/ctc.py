"""The loss of Connectionist Temporal Classification (Graves et al. 2006), whose tables have a size that a
graph can know.

torch's own operator returns its table of forward variables, as wide as the longest target of the batch, which
is known from values alone: it cannot be traced. This one gives the gradient with the loss, by torch's own
kernels, and keeps no table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effcompile.core.types import Args, Kwargs

aten = torch.ops.aten

__all__ = ["TraceableCTC", "ctc_loss", "workspace_bytes"]


@torch.library.custom_op("effcompile::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Losses (N,) and their gradient (T, N, C) by log_probs (T, N, C), as `torch.ctc_loss` with
    `reduction="none"`; targets are (N, S) or all in a row.
    """
    lengths = input_lengths, target_lengths
    losses, table = aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)
    gradient = aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), log_probs, targets, *lengths, losses, table, blank, zero_infinity
    )
    if zero_infinity:
        losses.masked_fill_(losses == torch.inf, 0)
    return losses, gradient


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def _setup(
    ctx: torch.autograd.function.FunctionCtx, inputs: Sequence[object], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: torch.autograd.function.BackwardCFunction, losses: Tensor, gradient: Tensor | None
) -> tuple[Tensor | None, ...]:
    (by_log_probs,) = ctx.saved_tensors
    return by_log_probs * losses[None, :, None], None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_setup)


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Forward and backward variables (N, T, 2 S + 1), S the longest a target may be."""
    if name != "effcompile::ctc_loss":
        return None
    log_probs, targets = args[:2]
    assert isinstance(log_probs, Tensor) and isinstance(targets, Tensor)
    steps, batch, _ = log_probs.shape
    tables = 2 * batch * steps * (2 * targets.shape[-1] + 1)
    # beside them: the losses again, their gradient, their sum, and lengths
    return (tables + 3 * batch + 1) * log_probs.element_size() + 32 * batch


class TraceableCTC(TorchFunctionMode):
    """Within, `F.ctc_loss` of a batch is the operator above."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        if func is torch.nn.functional.ctc_loss and args[0].dim() == 3:
            return _traceable(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _traceable(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As torch reduces it (aten/src/ATen/native/LossCTC.cpp: the mean is of losses per target's element)."""
    if torch.is_autocast_enabled(log_probs.device.type):  # CTC is on its list of what needs fp32
        log_probs = log_probs.float()
    lengths = [
        each if isinstance(each, Tensor) else torch.tensor(each, device=log_probs.device)
        for each in (input_lengths, target_lengths)
    ]
    losses: Tensor = torch.ops.effcompile.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses
