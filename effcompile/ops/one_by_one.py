"""What optimizers have in common that update one parameter at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OneByOne(Optimizer):
    """An optimizer whose step is `update` of every parameter that has a gradient, in the order of
    its groups.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Update all of them; returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, in place, by its group's options."""
