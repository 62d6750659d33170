"""A planned mean over labels as a share of a larger sum: what HuggingFace's `num_items_in_batch` asks of a
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from effcompile.backends.torch.boxed import run_graph
from effcompile.core.types import Args, Kwargs

#: The keyword of HuggingFace's models: how many labels count in all batches of an update.
ITEMS = "num_items_in_batch"


def with_items_as_tensor(kwargs: Kwargs) -> Kwargs:
    """The keyword arguments with `num_items_in_batch`, which changes at every call, as a tensor of one
    number.
    """
    items = kwargs.get(ITEMS)
    number = isinstance(items, (int, float)) or (isinstance(items, torch.Tensor) and items.numel() == 1)
    return (
        {**kwargs, ITEMS: torch.as_tensor(items, dtype=torch.float32).reshape(())} if number else dict(kwargs)
    )


@dataclass(frozen=True, kw_only=True)
class Items:
    """How a planned loss follows `num_items_in_batch`.

    Attributes:
        leaves: (args, kwargs) → the tensors that `counted` takes.
        counted: of them, how many labels the loss is the mean over; None where the model ignores
            `num_items_in_batch`.
    """

    leaves: Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]
    counted: fx.Graph | None

    def share(self, loss: torch.Tensor, args: Args, kwargs: Kwargs, items: torch.Tensor) -> torch.Tensor:
        """The loss as a share of all batches' labels; zero where this batch has none, as a sum
        over none is.
        """
        if self.counted is None:
            return loss
        (count,) = run_graph(self.counted, self.leaves(args, kwargs))
        return torch.where(
            count == 0, torch.zeros_like(loss), loss * (count.to(loss.dtype) / items.to(loss.device))
        )
