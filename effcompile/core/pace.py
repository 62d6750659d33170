"""Whether this machine runs as fast as it can: a small piece of work, timed beside all else that is timed.

Where another uses the same core (its second thread, a neighbour's virtual machine) everything takes 1.3 to
2 times as long, for 0.3 to 3 s at a time. A kernel that is timed then, kept for good and held against one of
a better second decides plans wrongly. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from time import perf_counter, sleep

#: Times the least seconds of the work up to which the machine runs as it can.
_EVEN = 1.2
#: Seconds between two looks, beside which a look is little; and between two while it is waited.
APART, _PAUSE = 8e-3, 2e-3
#: Times that a look does the work: the first brings it into the caches.
_TIMES = 5
#: Looks that are enough to know.
_LOOKS = 4


class Pace:
    """The least seconds that a piece of work took, and how long others may be waited for.

    Args:
        work: some 50 µs of what is measured, on all threads that it uses.
        best: its least seconds as earlier processes found them.
        patience: seconds that may be lost to waiting, and to measuring what then does not count, in all.
    """

    def __init__(self, work: Callable[[], object], best: float = math.inf, patience: float = 8.0) -> None:
        self._work, self.best, self.left, self._spared = work, best, patience, 0.0
        self._here, self._seen = math.inf, -math.inf
        self.even()

    def even(self) -> bool:
        """Whether it runs as it can; true, too, where nothing is left to wait with."""
        if self.left <= self._spared:
            return True
        seconds = min(self._once() for _ in range(_TIMES))
        self._here, self.best = min(self._here, seconds), min(self.best, seconds)
        even = seconds <= _EVEN * self.best
        self._seen = perf_counter() if even else -math.inf
        return even

    def surely_even(self) -> bool:
        """Whether it is seen to run as it can, at one of a few looks (threads that slept are slow at the
        first): not where nothing is left to wait with.
        """
        return any(self.even() and perf_counter() - self._seen < APART for _ in range(_LOOKS))

    def wait(self, lost: float = 0.0) -> float:
        """Until it runs as it can, or patience is at its end; returns the seconds lost, with these before."""
        start = perf_counter()
        seen = start - self._seen < APART and not lost
        while not seen and lost < self.left - self._spared and not self.even():
            sleep(_PAUSE)
            now = perf_counter()
            start, lost = now, lost + now - start
        self._lose(lost)
        return lost

    @contextlib.contextmanager
    def losing(self, seconds: float) -> Iterator[None]:
        """Within, so many seconds are lost at the most: what is timed is not worth more of those left."""
        before, self._spared = self._spared, max(self._spared, self.left - seconds)
        try:
            yield
        finally:
            self._spared = before

    def _lose(self, seconds: float) -> None:
        """At the end of patience the best is that of this process: of another clock or library an older one
        may never come again.
        """
        self.left -= seconds
        if self.left <= 0 < seconds:
            self.best = self._here

    def _once(self) -> float:
        start = perf_counter()
        self._work()
        return perf_counter() - start


_KEPT: ContextVar[Pace | None] = ContextVar("effcompile_pace", default=None)


def current_pace() -> Pace | None:
    """What timings are to be held against."""
    return _KEPT.get()


@contextlib.contextmanager
def at_pace(pace: Pace | None) -> Iterator[None]:
    """Within: what is timed is timed while the machine runs as it can."""
    token = _KEPT.set(pace)
    try:
        yield
    finally:
        _KEPT.reset(token)
