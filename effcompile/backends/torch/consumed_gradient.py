"""What stands in `parameter.grad` where the backward has handed the gradient to the optimizer: who reads it
is told so.
"""

from __future__ import annotations

from typing import Any

import torch

from effcompile.core import torch_compat_aot
from effcompile.core.errors import InputsError


class ConsumedGradient(torch.Tensor):
    """A gradient that is gone, of no bytes.

    With none at all clip_grad_norm_ would take it for 0, and the step would not be clipped.
    """

    place: str

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str) -> ConsumedGradient:
        made = torch_compat_aot.without_storage(cls, parameter)
        assert isinstance(made, cls)
        made.place = name
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # what is shown has no contents
        return f"<the gradient of {self.place}, consumed in the backward>"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises InputsError: whatever is asked of it."""
        name = getattr(function, "__name__", "")
        raise InputsError(
            f"{'Something' if name.startswith('__') or not name else name} reads a gradient that this plan's "
            "backward has consumed: the parameters are updated already, so that gradients can be neither "
            "clipped nor read nor accumulated. Plan with --pass states.in_backward=false, or leave clipping "
            "out (max_grad_norm=0 of Hugging Face's Trainer)."
        )

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # the base's has no name for what it is called with
