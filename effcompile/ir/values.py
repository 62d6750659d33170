"""Inputs whose values are fixed in a plan: the model's Python reads them, and its graph follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effcompile.core.errors import GuardError, clipped


def planned_values(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The only values that an input of this shape may have, given row by row."""
    return torch.tensor(values, device=like.device).view(like.shape).to(like.dtype)


def check_values(name: str, found: torch.Tensor, planned: torch.Tensor) -> None:
    """Raises GuardError where an input has other values than the plan was made with."""
    if not torch.equal(found, planned):
        raise GuardError(
            f"{name} has other values than when the plan was made, and the model's Python reads them, so "
            f"that its graph is of those alone. They were {clipped(str(planned.tolist()))} and are "
            f"{clipped(str(found.tolist()))}. Plan again with these.",
            place=f"inputs[{name!r}].values",
        )
