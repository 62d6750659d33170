"""Results of a lowered model where the model's own would have a gradient: to differentiate them is refused in words.

A lowered model has no backward. Without a word its results would be constants to autograd, and a loss that is made of them and of
something else would train the rest with a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from effcompile.core import torch_compat
from effcompile.core.errors import InputsError

#: What makes autograd take the results for differentiable; no gradient ever arrives at it.
_ANCHOR = torch.zeros((), requires_grad=True)


class GradientGuard:
    """Watches one lowered model. `parameters`: the original's."""

    def __init__(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        self._name, self._parameters = name, tuple(parameters)

    def check(self) -> None:
        """Raises InputsError within a transform of torch.func, which has no rule for a lowered model."""
        if torch_compat.in_function_transform():
            raise InputsError(
                f"The optimized {self._name} was called within a transform of torch.func (grad, vmap, jvp ...), which looks into its "
                f"operators. A lowered model has none: use the model itself there."
            )

    def results(self, inputs: Sequence[torch.Tensor], outputs: list[Any]) -> list[Any]:
        """The outputs; where the model's own would require a gradient, they do too, and refuse to be differentiated."""
        if not torch.is_grad_enabled():
            return outputs
        if any(tensor.requires_grad for tensor in inputs):
            said = "an input of this call requires"
        elif any(parameter.requires_grad for parameter in self._parameters):
            said = "parameters of the model require"
        else:
            return outputs
        made: tuple[Any, ...] = _Refusing.apply(_ANCHOR, outputs, (self._name, said))
        return list(made)


class _Refusing(torch.autograd.Function):
    """Hands on what was computed; its backward says why there is none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, outputs: list[Any], said: tuple[str, str]) -> tuple[Any, ...]:
        ctx.said = said
        made = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in outputs)  # never an input's own object
        tensors = [value for value in made if isinstance(value, torch.Tensor)]
        ctx.mark_non_differentiable(*(t for t in tensors if not (t.is_floating_point() or t.is_complex())))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        name, said = ctx.said
        raise InputsError(
            f"A gradient arrived at what the optimized {name} returned. A lowered model has no backward, and {said} one, which would be "
            "lost. To train through it, use the model itself, or plan its training step (mode='training'); its .train() runs the model "
            "itself, too. If no gradient is wanted, call it under torch.no_grad() or take .detach() of the result."
        )
