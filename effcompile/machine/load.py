"""Whether others use this machine while something is timed: by how far repeats of one small piece of work lie
apart.
"""

from __future__ import annotations

import os
from time import perf_counter

#: The mean of the repeats over their least, from which on times are not this machine's own. Idle machines
#: stay below 1.3.
APART = 1.6

_SECONDS = 0.06
_WORK = 20_000


def busy() -> str:
    """In words, why times that are taken now do not hold; "" where they do.

    It takes some 60 ms, longer where the machine is busy.
    """
    if (apart := spread()) < APART:
        return ""
    cores = os.cpu_count() or 1
    return (
        f"repeats of one piece of work took {apart:.1f}x the least time, load {_load():.1f} on {cores} "
        f"core{'s' * (cores > 1)}"
    )


def spread() -> float:
    """The mean of repeated times of one small piece of work over the least of them: 1 where nothing
    interferes.
    """
    samples: list[float] = []
    while sum(samples) < _SECONDS:
        start = perf_counter()
        sum(range(_WORK))
        samples.append(perf_counter() - start)
    return sum(samples) / len(samples) / min(samples)


def _load() -> float:
    """Processes that ran or waited in the last minute, less this one."""
    try:
        return max(0.0, os.getloadavg()[0] - 1.0)
    except (AttributeError, OSError):  # Windows has none
        return 0.0
