"""How long planning searches: seconds of solving for a whole call, of which every solve takes its share.

Measuring kernels and errors, capture, lowering and verification are not search. What is not proven when its
time is up is the best that was found, and the plan tells the gap that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from effcompile.core.errors import UsageError

Effort = Literal["low", "normal", "high"]
EFFORTS: tuple[str, ...] = get_args(Effort)

#: Seconds of a whole call, and times those that a solve usually may take.
_SECONDS = {"low": (15.0, 0.25), "normal": (60.0, 1.0), "high": (600.0, 8.0)}
#: Seconds of a solve when those of the call are used up: a choice is found at once, its proof takes the time.
_LEAST = 0.5


class _Purse:
    """What is left of a call's seconds, and times what each solve may take."""

    def __init__(self, effort: str) -> None:
        self.left, self.times = _SECONDS[effort]


_purse: ContextVar[_Purse | None] = ContextVar("effort", default=None)


def check(effort: str) -> None:
    """Raises UsageError for another effort than there is."""
    if effort not in EFFORTS:
        raise UsageError(
            f"effort = {effort!r} is not known. How long planning searches: {', '.join(map(repr, EFFORTS))}."
        )


@contextmanager
def within(effort: str) -> Iterator[None]:
    """Solves within take what this effort allows."""
    token = _purse.set(_Purse(effort))
    try:
        yield
    finally:
        _purse.reset(token)


def is_low() -> bool:
    """Whether what may turn out to be better, and is not predicted to be, is left alone."""
    purse = _purse.get()
    return purse is not None and purse.times < 1


def is_high() -> bool:
    """Whether also that is built which is expected to lose."""
    purse = _purse.get()
    return purse is not None and purse.times > 1


def allowed(seconds: float) -> float:
    """Seconds that a solve may take which usually has so many."""
    purse = _purse.get()
    if purse is None:
        return seconds
    return min(seconds * purse.times, max(purse.left, min(_LEAST, seconds)))


def spend(seconds: float) -> None:
    """A solve took so many."""
    if (purse := _purse.get()) is not None:
        purse.left -= seconds
