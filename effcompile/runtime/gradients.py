"""Results of a lowered model where the model's own would have a gradient: to differentiate them is refused in
words.

A lowered model has no backward. Without a word its results would be constants to autograd, and a loss that is
made of them and of something else would train the rest with a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from effcompile.backends.torch.refusing import joined, refuse_recording, refusing
from effcompile.core.types import Outputs

_NO_BACKWARD = (
    "A gradient arrived at what the optimized {name} returned. A lowered model has no backward, and {said} "
    "one, which would be lost. To train through it, use the model itself, or plan its training step "
    "(mode='training'); its .train() runs the model itself, too. If no gradient is wanted, call it under "
    "torch.no_grad() or take .detach() of the result."
)


class GradientGuard:
    """Watches one lowered model. `parameters`: the original's."""

    def __init__(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        self._name, self._parameters = name, tuple(parameters)
        self._joined: torch.Tensor | None = None

    def check(self) -> None:
        """Raises InputsError within a transform of torch.func, which has no rule for a lowered model, and
        within a trace, which would record what was lowered as constants.
        """
        refuse_recording(
            f"The optimized {self._name}",
            "A lowered model has none: use the model itself there, or, for a file, executable.save(folder).",
        )

    def results(self, inputs: Sequence[torch.Tensor], outputs: list[Outputs]) -> list[Outputs]:
        """The outputs; where the model's own would require a gradient, they do too, and refuse to be
        differentiated.
        """
        if not torch.is_grad_enabled():
            return outputs
        given = [tensor for tensor in inputs if tensor.requires_grad]
        trained = any(parameter.requires_grad for parameter in self._parameters)
        if not given and not trained:
            return outputs
        if trained and self._joined is None:
            self._joined = joined([parameter for parameter in self._parameters if parameter.requires_grad])
        said = "an input of this call requires" if given else "parameters of the model require"
        of = [*given, self._joined] if trained and self._joined is not None else given
        return list(refusing(outputs, _NO_BACKWARD.format(name=self._name, said=said), of))
