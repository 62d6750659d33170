"""How far apart two exact results may be: the model's own rounding, told by a copy of it in float64."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.core.goal import Goal
from effcompile.ir.resident import resident_bytes
from effcompile.machine.room import Room, device_of

#: No exact result may be further off than this, whatever the model's own rounding: beyond, rounding chose
#: another branch (an expert). Of a model with weights in 16 bits it is a few times their unit roundoff (2^-8,
#: 2^-11), as sums of such products are.
_MOST = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_MOST_OTHERWISE = 1e-4


def most_rounding(model: nn.Module) -> float:
    """The largest error that rounding may explain, by the coarsest dtype of the parameters."""
    return max((_MOST.get(p.dtype, _MOST_OTHERWISE) for p in model.parameters()), default=_MOST_OTHERWISE)


def exact_limit(goal: Goal, error: float, most: float, rounding: Callable[[], float]) -> float:
    """The largest error to accept: the goal's, or, of an exact goal, what tells two roundings of one value
    apart.

    A result as near to the true value as the model's own is at most twice as far from the model's (triangle
    inequality). T5's unscaled scores, for one, make of fp32 rounding 2e-5 at random weights, in eager PyTorch
    and in Inductor alike; a Llama in bf16 differs by 3e-3 from itself when its prompt is given in two parts.
    `rounding` runs the model, where it is asked for.
    """
    if not goal.exact or not goal.tolerance < error <= most:
        return goal.tolerance
    return max(goal.tolerance, min(2 * rounding(), most))


def doubled(values: object) -> Any:
    """Nested arguments with their floating tensors in float64."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, values)


def wide_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in float64, which runs so; raises what copying it raises."""
    copy = deepcopy(model).double()
    chosen = (getattr(part, "set_experts_implementation", None) for part in copy.modules())
    if (choose := next(filter(None, chosen), None)) is not None:
        choose("eager")  # no other product of experts takes float64
    return copy


def in_float64(model: nn.Module, goal: Goal) -> nn.Module | None:
    """A copy of the model in float64; None where there is no room for one, or it cannot be copied."""
    nbytes = resident_bytes(model)
    if Room.of(device_of(model), nbytes, goal.memory).refusal(3 * nbytes, 4 * nbytes):
        # a copy, and what double() makes of it
        return None
    try:
        return wide_copy(model)
    except Exception:  # state that cannot be copied: the plain limit holds
        return None
