"""Honest timing of callables: one alone, or several against each other in turn. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from effcompile.core.pace import APART, current_pace

#: Times the seconds that measuring may take; the tests' is small.
PATIENCE = 1.0
#: A figure has settled when twice as many samples give the same but for this share.
SETTLED = 0.02
#: Samples before which no figure has settled.
_FEWEST = 8
#: Seconds of a call from which on it need not find the caches as it left them.
_LONG = 0.1
#: Samples of a call that takes longer than this share of the seconds that all of them should: it is an
#: average itself.
_OF_LONG, _LONG_SHARE = 3, 0.25


def median_seconds(
    fn: Callable[[], object],
    *,
    min_rounds: int = 5,
    budget: float = 0.15,
    settled: float = 0.0,
    before: Callable[[], object] | None = None,
    warm: float | None = None,
) -> float:
    """Seconds of one warm call of `fn`: the median of the faster half of its samples.

    On a shared machine noise only ever adds time (preemption, cold caches), so the slower half is dropped;
    the minimum is not taken either, as it rewards a lucky clock and is not what a user sees. One untimed call
    warms up; a call shorter than 20 µs is repeated within a sample, so that the clock's own cost does not
    count.

    Args:
        fn: the callable.
        min_rounds: samples taken at the least, even beyond the budget (at least 1); three are enough of a
            call longer than a quarter of the budget, whose length averages the noise out.
        budget: seconds after which no further sample is started.
        settled: stop before, once twice as many samples give the same figure but for this share.
        before: run before each sample, which then is one call, and not timed.
        warm: seconds of a warm call that has just been; none is made for that.

    At a pace (core/pace.py) samples count that were taken while the machine ran as it can.
    """
    if warm is None:
        fn()
    repeats, once = _repeats(fn, warm)
    if before is not None:
        repeats, once = 1, 0.0
    pace = current_pace()
    long = 0 < _LONG_SHARE * budget <= once
    fewest = max(1, min(min_rounds, _OF_LONG) if long else min_rounds)
    samples = [once] if long and pace is None else []
    checked = max(_FEWEST, min_rounds)
    if pace is not None:
        pace.wait()
    deadline = perf_counter() + budget * PATIENCE
    while len(samples) < fewest or (not long and perf_counter() < deadline):
        start = perf_counter()
        most = max(1, checked - len(samples)) if settled else math.inf
        some = _some_samples(fn, repeats, before, 0.0 if pace is None else APART, most)
        if pace is not None and not pace.even():
            deadline += pace.wait(perf_counter() - start)
            continue
        samples += some
        if settled and len(samples) >= checked:
            if have_settled([samples], settled):
                break
            checked = 2 * len(samples)
    return faster_half_median(samples)


def _some_samples(
    fn: Callable[[], object], repeats: int, before: Callable[[], object] | None, seconds: float, most: float
) -> list[float]:
    """Those of so many seconds, one at the least and so many at the most."""
    samples: list[float] = []
    first = perf_counter()
    while not samples or (len(samples) < most and perf_counter() - first < seconds):
        if before is not None:
            before()
        start = perf_counter()
        for _ in range(repeats):
            fn()
        samples.append((perf_counter() - start) / repeats)
    return samples


def have_settled(figures: Iterable[list[float]], share: float = SETTLED) -> bool:
    """Whether each figure is, but for this share, that of the first half of its samples."""
    pairs = [(faster_half_median(each[: len(each) // 2]), faster_half_median(each)) for each in figures]
    return all(abs(now - before) <= share * now for before, now in pairs)


def faster_half_median(samples: list[float]) -> float:
    """The median of the faster half (rounded up) of the samples, about their first quartile.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("No samples to take the median of.")
    faster = sorted(samples)[: (len(samples) + 1) // 2]
    middle = len(faster) // 2
    return faster[middle] if len(faster) % 2 else (faster[middle - 1] + faster[middle]) / 2


def interleaved(
    fns: Mapping[str, Callable[[], object]], rounds: int, *, repeats: int = 2
) -> dict[str, list[float]]:
    """Time several callables in turn, so that a slow minute of the machine falls on all of them alike.

    Each round runs all of them, starting one further each time; each is called once untimed after the switch
    (another model has just used the caches, which of a long call is little), then timed `repeats` times.

    Returns:
        name → seconds of every timed call, `rounds · repeats` each, in the order measured.
    """
    samples: dict[str, list[float]] = {name: [] for name in fns}
    names = list(fns)
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if not samples[name] or samples[name][-1] < _LONG:
                fns[name]()
            for _ in range(repeats):
                start = perf_counter()
                fns[name]()
                samples[name].append(perf_counter() - start)
    return samples


def _repeats(fn: Callable[[], object], once: float | None, floor: float = 20e-6) -> tuple[int, float]:
    """(how often a callable must run for a sample to last at least `floor` seconds, seconds of one run: of
    one that was, or of one that is made).
    """
    if once is None:
        start = perf_counter()
        fn()
        once = perf_counter() - start
    once = max(once, 1e-8)
    return max(1, min(1000, round(floor / once))), once
