"""Tensors that launches read and caches own: whoever records launches to repeat them keeps these too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

Tensors = TypeVar("Tensors", bound=Sequence[Tensor])

_keepers: ContextVar[list[Tensor] | None] = ContextVar("keepers", default=None)


@contextmanager
def keeping() -> Iterator[list[Tensor]]:
    """What it yields holds, after the context, all that was passed to `keep` in it."""
    found: list[Tensor] = []
    token = _keepers.set(found)
    try:
        yield found
    finally:
        _keepers.reset(token)


def keep(tensors: Tensors) -> Tensors:
    """The tensors; a recording that is under way will not outlive them."""
    keepers = _keepers.get()
    if keepers is not None:
        keepers.extend(tensors)
    return tensors
