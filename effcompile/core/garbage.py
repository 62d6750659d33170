"""Python's cyclic garbage collector, where it would be in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Looks at what is young after which all of the process is looked at, while a step is planned. Python's own
#: number is 10.
_SELDOM = 100


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The collector rests: what it freed meanwhile would be of before, and taken off what is watched here."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """The collector looks at the whole process a tenth as often; at what is young as ever. Not for two
    threads at once.

    A step's graphs and the schedules made of them stay while it is planned. Each look goes through all of
    them, and finds little: 13 looks took two of the 36 seconds in which GPT-2 was planned once more.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], _SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)
