"""Values that say why they have no gradient, to whoever differentiates them: never a gradient that is lost
without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from effcompile.core import torch_compat
from effcompile.core.errors import InputsError
from effcompile.core.types import Args, AutogradContext, Value

#: What makes autograd take the values for differentiable; no gradient ever arrives at it.
_ANCHOR = torch.zeros((), requires_grad=True)


def refusing(values: Sequence[object], said: str, of: Sequence[torch.Tensor] = ()) -> Args:
    """The same values, whose backward raises InputsError with what is `said`.

    What is no floating-point tensor stays as it is.

    of: what they were computed of: torch.autograd.grad runs no backward that leads to none of the tensors it
    is asked for.
    """
    with torch.enable_grad():
        made: tuple[Any, ...] = _Refusing.apply(values, said, *(of or (_ANCHOR,)))
    return made


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One that stands for many in `of`."""
    with torch.enable_grad():
        made: torch.Tensor = _Refusing.apply((torch.zeros(()),), "", *tensors)[0]
    return made


def refuse_recording(called: str, instead: str) -> None:
    """Raises InputsError where the operators of what is `called` are asked for: a transform of torch.func
    looks into them, a trace records them. `instead`: what to do.
    """
    within = (
        "a transform of torch.func (grad, vmap, jvp ...)" if torch_compat.in_function_transform() else
        "torch.export or torch.jit.trace" if torch_compat.in_trace() else
        ""
    )  # fmt: skip
    if within:
        raise InputsError(f"{called} was called within {within}, which looks into operators. {instead}")


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, values: Sequence[object], said: str, *of: torch.Tensor) -> Args:
        ctx.said = said
        # never a caller's own object
        made = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)
        tensors = [value for value in made if isinstance(value, torch.Tensor)]
        ctx.mark_non_differentiable(*(t for t in tensors if not (t.is_floating_point() or t.is_complex())))
        return made

    @staticmethod
    def backward(ctx: AutogradContext, *_: object) -> Value:
        raise InputsError(ctx.said)


def cut_off_words(name: str) -> str:
    """Of a gradient that arrives at an output which the plan does not differentiate."""
    return (
        f"A gradient arrived at {name}, which is returned for show (keep_outputs=True): the plan has the "
        f"gradients of the loss alone, and those through {name} would be lost. Make it a part of the loss, "
        f"effcompile.optimize(..., loss=lambda outputs, inputs: outputs.loss + ...), or take {name}.detach()."
    )
