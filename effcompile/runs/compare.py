"""How much a change of a model changes what it computes: measured on a stage's example inputs, in evaluation
mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.capture.mends import evaluating
from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs


def change_of_function(model: nn.Module, example: Example, change: Callable[[], object]) -> float | None:
    """Carry out a change; returns ‖after − before‖ / ‖before‖ over the model's outputs, None on the meta
    device.
    """
    if any(p.is_meta for p in model.parameters()):
        change()
        return None
    before = outputs_of(model, example)
    change()
    after = outputs_of(model, example)
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a.shape == b.shape]
    whole = sum(float(a.double().square().sum()) for a, _ in pairs)
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((apart / max(whole, 1e-300)) ** 0.5)


def outputs_of(model: nn.Module, example: Example) -> list[Tensor]:
    """The floating tensors that the model returns."""
    args, kwargs = as_inputs(example)
    with torch.no_grad(), evaluating(model):
        returned = model(*args, **kwargs)
    leaves = pytree.tree_leaves(dict(returned) if hasattr(returned, "items") else returned)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
