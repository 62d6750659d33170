"""States of one parameter, as a state_dict has them: whether they are of the form of an optimizer that is to
take them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from effcompile.core.errors import FormatError
from effcompile.ops.optimizers import EIGHT_BIT, GIVEN, LION8, StatesForm, pieces
from effcompile.ops.states8 import BLOCK, LEAST

State = Mapping[str, Any]


def parts_of(state: State, count: int) -> list[State | None]:
    """The states of a parameter's pieces; None for one that is not there."""
    return [state] if count == 1 else [state.get(f"piece {i}") for i in range(count)]


def check_state(form: StatesForm, given: type, parameter: torch.Tensor, state: State | None) -> None:
    """Make sure that an optimizer of this form goes on from these states; without any it begins anew.

    Raises:
        FormatError: they are of another form.
    """
    leaves = pieces(form, parameter.detach())
    found = parts_of(state, len(leaves)) if state else []
    if not all(_fits(form, given, leaf, part) for leaf, part in zip(leaves, found, strict=False)):
        raise FormatError(
            f"The saved states are not of the form {form.name!r} that is planned here: plan as when they "
            "were saved, or, where that was without a plan, with --pass states.eight_bit=false."
        )


def _fits(form: StatesForm, given: type, leaf: torch.Tensor, state: State | None) -> bool:
    if state is None or "piece 0" in state:
        return False
    if form.name == GIVEN and given.__module__.partition(".")[0] == "torchao":
        return True  # whose states in 8 bits are its own
    if "lion" in form.name and "exp_avg_sq" in state:  # Adam's
        return False
    coded = "codes" in state or any(hasattr(value, "codes") for value in state.values())
    large = leaf.numel() >= LEAST and leaf.numel() % BLOCK == 0
    large &= form.name == EIGHT_BIT or leaf.is_contiguous()
    return not state or coded == (large and form.name in (EIGHT_BIT, LION8))
