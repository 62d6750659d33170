"""The loss of an fp16 step, scaled behind autograd so that small gradients do not vanish:
torch.amp.GradScaler around the planned backward.

The arriving gradient is multiplied by the scale, the gradients of the parameters are divided by it. Where one
of them is not finite, all are withheld and the scale is lowered: `optimizer.step()` then leaves the
parameters and its states, as GradScaler.step would skip it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from effcompile.core.errors import UsageError

#: A gradient at the loss that is a power of two from here up was made by an outer GradScaler: no loop weighs
#: a loss so.
_OUTER = 2.0**10


class LossScale:
    """`scaler`: torch's own, whose state_dict belongs in a checkpoint.

    `overflowed`: whether the last gradients were withheld.
    """

    def __init__(self, device: str) -> None:
        self.scaler = GradScaler(device)
        self.overflowed = False

    def scaled(self, tangent: Tensor) -> Tensor:
        """The gradient that arrives at the loss, times the scale."""
        return self.scaler.scale(tangent)

    def unscaled(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients over the scale, in place, or None for each where one of them is not finite; then the
        scale is updated.
        """
        kept = [_writable(gradient) for gradient in gradients]
        holder = _Holder(list({_place(g): g for g in kept if g is not None}.values()))
        before = self.scaler.get_scale()
        self.scaler.unscale_(holder)
        self.scaler.step(holder)
        self.scaler.update()
        self.overflowed = not holder.finite
        if not self.overflowed:
            return kept
        warnings.warn(
            "A gradient overflowed fp16: this step's gradients are withheld, so that optimizer.step() "
            f"changes nothing, and the loss scale goes from {before:g} to {self.scaler.get_scale():g}. "
            "Expected now and then; if it happens at every step, plan in bf16.",
            stacklevel=2,
        )
        return [None] * len(kept)


def unscaled_factor(tangent: Tensor) -> float:
    """The gradient that arrived at the loss.

    Raises:
        UsageError: an outer loss scale is in it.
    """
    factor = float(tangent)
    if factor >= _OUTER and math.frexp(factor)[0] == 0.5:
        raise UsageError(
            f"The gradient that arrives at the loss is {factor:g}, as from torch.amp.GradScaler. This plan "
            "is in fp16 and scales its loss itself, and two scales do not know of each other's overflows. "
            "Leave yours out, or make it with GradScaler(enabled=False); the plan's own is `planned.scaler`."
        )
    return factor


def times(gradients: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    """Gradients of a loss times a factor, in place: after the scale is gone, so that no factor makes fp16
    overflow.
    """
    distinct = {_place(gradient): gradient for gradient in gradients if gradient is not None}
    for gradient in distinct.values() if factor != 1.0 else ():
        gradient.mul_(factor)
    return list(gradients)


class _Holder(torch.optim.Optimizer):
    """What GradScaler takes for an optimizer: it unscales the gradients, and calls `step` only where all are
    finite.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self.finite = False
        views = []
        for gradient in gradients:
            view = gradient.detach()
            view.grad = gradient
            views.append(view)
        self.param_groups = [{"params": views}]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.finite = True


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Equal for two names of the same elements: these must be divided once."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _writable(gradient: Tensor | None) -> Tensor | None:
    """The gradient, with a place of its own for every element."""
    if gradient is None or all(
        stride or size == 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True)
    ):
        return gradient
    return gradient.contiguous()
