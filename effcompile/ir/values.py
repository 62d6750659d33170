"""Inputs whose values are fixed in a plan: the model's Python reads them, and its graph follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effcompile.core.errors import GuardError, clipped


def planned_values(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The only values that an input of this shape may have, given row by row."""
    return torch.tensor(values, device=like.device).view(like.shape).to(like.dtype)


def counted(counts: Sequence[tuple[int, int]]) -> str:
    """How often each of some numbers is among an input's values, as text."""
    return ", ".join(f"{number} {times} times" for number, times in counts)


def check_counts(name: str, found: torch.Tensor, counts: Sequence[tuple[int, int]]) -> None:
    """Raises GuardError where a number is not as often among an input's values as the plan was made for."""
    for number, times in counts:
        here = int((found == number).sum())
        if here != times:
            raise GuardError(
                f"{name} holds {number} {here} times, and held it {times} times when the plan was made: "
                "sizes in the model follow from that. Plan again with this.",
                place=f"inputs[{name!r}].values",
            )


def check_values(name: str, found: torch.Tensor, planned: torch.Tensor) -> None:
    """Raises GuardError where an input has other values than the plan was made with."""
    if not torch.equal(found, planned):
        raise GuardError(
            f"{name} has other values than when the plan was made, and the model's Python reads them, so "
            f"that its graph is of those alone. They were {clipped(str(planned.tolist()))} and are "
            f"{clipped(str(found.tolist()))}. Plan again with these.",
            place=f"inputs[{name!r}].values",
        )
