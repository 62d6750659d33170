"""Captured graphs and torch.autocast: the casts that it makes do not stand in them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

#: (device, dtype) of each torch.autocast that is on.
Autocasts = tuple[tuple[str, torch.dtype], ...]
_DEVICES = ("cpu", "cuda")


def autocasts() -> Autocasts:
    """Those that are on now."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)
    )


def named(held: Autocasts) -> dict[str, str]:
    """For a file."""
    return {device: str(dtype).removeprefix("torch.") for device, dtype in held}


def of_names(names: Mapping[str, str]) -> Autocasts:
    """What `named` wrote. Raises ValueError for what is no device or dtype."""
    found = tuple((device, getattr(torch, name, None)) for device, name in names.items())
    if unknown := [each for each in found if each[0] not in _DEVICES or not isinstance(each[1], torch.dtype)]:
        raise ValueError(f"there is no such autocast: {unknown}")
    return found  # type: ignore[return-value]


def within(wanted: Autocasts = ()) -> AbstractContextManager[object]:
    """What a saved graph is run in: the autocasts that it was planned in, whatever the caller's are.

    Another one's casts change what it computes, and kernels in C++ read the dtypes that they were made for:
    a generation that was opened and called within autocast wrote NaN.
    """
    planned, now = dict(wanted), dict(autocasts())
    if planned == now:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in _DEVICES:
        if planned.get(device) != now.get(device):
            stack.enter_context(torch.autocast(device, dtype=planned.get(device), enabled=device in planned))
    return stack
