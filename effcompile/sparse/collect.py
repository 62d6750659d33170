"""What saliencies need of data: norms of a layer's inputs (Wanda), and gradients of the loss (SNIP)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError

__all__ = ["input_norms", "loss_gradients"]


def input_norms(
    model: nn.Module, names: Sequence[str], batches: Iterable[object], call: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """‖x_i‖₂ of every input feature of the named linear layers over all rows of all batches, (I) each.

    Args:
        model: left as it is; put it in eval mode first when it has dropout.
        names: linear layers of the model.
        batches: calibration data.
        call: runs the forward on one batch.

    Raises:
        UsageError: a layer that no batch reached.
    """
    squares: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().float()
            squares[name] = squares.get(name, 0) + x.reshape(-1, x.shape[-1]).square().sum(dim=0)

        return add

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with torch.no_grad():
            for batch in batches:
                call(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: squares[name].sqrt() for name in _reached(names, squares)}


def loss_gradients(
    model: nn.Module, names: Sequence[str], batches: Iterable[object], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """The gradient of the loss, summed over the batches, with respect to the named linear layers' weights,
    (O, I) each.

    Gradients that the model has are left alone.

    Args:
        model: at the weights that the gradient is wanted at; for SNIP, freshly made.
        names: linear layers of the model.
        batches: training data.
        loss: of one batch, a scalar.

    Raises:
        UsageError: a layer that the loss does not depend on.
    """
    weights = [model.get_parameter(f"{name}.weight") for name in names]
    sums: dict[str, Tensor] = {}
    for batch in batches:
        for name, gradient in zip(
            names, torch.autograd.grad(loss(batch), weights, allow_unused=True), strict=True
        ):
            if gradient is not None:
                sums[name] = sums.get(name, 0) + gradient
    return {name: sums[name] for name in _reached(names, sums)}


def _reached(names: Sequence[str], found: dict[str, Tensor]) -> Sequence[str]:
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"No batch reached {', '.join(missing[:4])}: give at least one, and only layers that it runs "
            "through."
        )
    return names
