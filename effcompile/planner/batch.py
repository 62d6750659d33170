"""The batch that takes the most examples a second within the memory, of a list of sizes.

For a size b let T(b) be the least seconds of a step of b examples within the memory, infinite where nothing
fits, and U(b) ≤ T(b) the least with no limit on memory. What is wanted is the largest b / T(b). Assumed is

    (1)  what fits for b examples fits for fewer;
    (2)  U(b) / b does not grow with b, for larger batches share what is paid once: the update, weights that
        are read, launches;
    (3)  U(c) − U(b) ≥ s · (c − b) for b ≤ c, s being what the last examples before b took each: U is convex,
         as the roofline of every operator is (Williams et al. 2009: the larger of two affine functions of b,
         and a constant).

Sizes are tried upwards until none fits, or (3) says that no larger batch is faster by more than `worth`;
between the largest that fits and the least that does not by bisection, with (1); then downwards while (2)
leaves room: fewer than b examples take no more a second than b / U(b), which is what they are compared with.
So no size that was left out is better than the best by more than `worth`, where the assumptions hold; on
measured times they hold as far as the clock does. That the bytes of a step with everything kept grow by as
much with every example leads to the sizes worth trying, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from effcompile.core.errors import UsageError

#: Who decides it, in a plan.
BY = "batch"
#: Batches larger than this are not looked for.
LARGEST = 1 << 16
#: A batch is larger only where that gains more than this share.
WORTH = 0.01
#: So many sizes of a range are tried one by one; of a wider one those of `sizes`.
_FEW = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial(Generic[T]):
    """A batch that was tried.

    Attributes:
        seconds: of a step, None where nothing fits. unlimited: with no limit on memory, when it takes so many
            `bytes`.
        made: the plan, where something fits.
    """

    batch: int
    unlimited: float
    bytes: int
    seconds: float | None = None
    made: T | None = None

    @property
    def rate(self) -> float:
        """Examples a second; 0 where nothing fits."""
        return self.batch / self.seconds if self.seconds else 0.0

    @property
    def most(self) -> float:
        """Examples a second that no smaller batch exceeds: (2)."""
        return self.batch / self.unlimited


@dataclass(kw_only=True)
class BatchSearch(Generic[T]):
    """The search. `sizes`: ascending; `attempt`: a size → what became of it within the `memory`."""

    sizes: Sequence[int]
    memory: int
    attempt: Callable[[int], BatchTrial[T]]
    worth: float = WORTH
    tried: dict[int, BatchTrial[T]] = field(default_factory=dict)

    def best(self, start: int) -> BatchTrial[T] | None:
        """The size that takes most examples a second, the search beginning at `start`; None where nothing
        fits at any size.
        """
        at = next((i for i, size in enumerate(self.sizes) if size >= start), len(self.sizes) - 1)
        fits, not_fits = self._upwards(at)
        while not_fits - fits > 1:
            middle = (fits + not_fits) // 2
            fits, not_fits = (middle, not_fits) if self._fits(middle) else (fits, middle)
        for i in range(fits, -1, -1):
            if self._at(i).most <= self._fastest * (1 + self.worth):
                break
        found = [trial for trial in self.tried.values() if trial.seconds is not None]
        return max(found, key=lambda trial: (trial.rate, -trial.batch), default=None)

    def beside(self, batch: int) -> list[BatchTrial[T]]:
        """The next smaller and the next larger size, where they fit."""
        at = self.sizes.index(batch)
        return [self._at(i) for i in (at - 1, at + 1) if 0 <= i < len(self.sizes) and self._fits(i)]

    def _upwards(self, at: int) -> tuple[int, int]:
        """The last place that fits and the first that does not, as far as is known; the latter is the former
        + 1 where there is no need.
        """
        if not self._fits(at):
            return -1, at
        stride = 1
        while at + 1 < len(self.sizes) and not self._no_larger(at):
            further = min(max(at + stride, self._keeping_all), len(self.sizes) - 1)
            if not self._fits(further):
                return at, further
            at, stride = further, min(2, len(self.tried) - 1)
        return at, at + 1

    @property
    def _keeping_all(self) -> int:
        """The place of the largest size at which everything can be kept, as two that were tried
        foretell it.
        """
        tried = sorted(self.tried.values(), key=lambda trial: trial.batch)
        if len(tried) != 2 or tried[1].bytes <= tried[0].bytes:
            return 0
        each = (tried[1].bytes - tried[0].bytes) / (tried[1].batch - tried[0].batch)
        largest = tried[1].batch + (self.memory - tried[1].bytes) / each
        return max((i for i, size in enumerate(self.sizes) if size <= largest), default=0)

    def _no_larger(self, at: int) -> bool:
        """Whether no larger batch can be worth it: (3), from the two largest that were tried."""
        tried = sorted(self.tried)
        if len(tried) < 2 or tried[-1] != self.sizes[at]:
            return False
        before, last = self.tried[tried[-2]], self.tried[tried[-1]]
        each = (last.unlimited - before.unlimited) / (last.batch - before.batch)
        return each > 0 and 1 / each <= self._fastest * (1 + self.worth)

    @property
    def _fastest(self) -> float:
        return max((trial.rate for trial in self.tried.values()), default=0.0)

    def _fits(self, at: int) -> bool:
        return self._at(at).seconds is not None

    def _at(self, place: int) -> BatchTrial[T]:
        size = self.sizes[place]
        if size not in self.tried:
            self.tried[size] = self.attempt(size)
        return self.tried[size]


def sizes(least: int = 1, most: int = LARGEST) -> list[int]:
    """Powers of two and the halves between them, 1 2 3 4 6 8 12 16 ..., within a range whose ends are among
    them; every one of a few.
    """
    if most - least < _FEW:
        return list(range(least, most + 1))
    powers = [1 << i for i in range(most.bit_length() + 1)]
    between = [a + (b - a) // 2 for a, b in pairwise(powers) if b - a > 1]
    # an open end is no size that anybody asked for
    ends = {least, most} if most < LARGEST else {least}
    return sorted({size for size in (*powers, *between) if least <= size <= most} | ends)


def wanted_sizes(batch: int | str | Sequence[int]) -> list[int]:
    """What a user asks for: "auto", a range "8..64", a number, or a list of them.

    Raises:
        UsageError: none of these, or no positive numbers.
    """
    if batch == "auto":
        return sizes()
    try:
        found = _parsed(batch)
    except (ValueError, TypeError):
        found = []
    if not found or found[0] < 1 or found[-1] > LARGEST:
        raise UsageError(
            f"batch = {batch!r} is no batch. Give 'auto', a range of examples a step as '8..64', a number, "
            f"or a list of them, of 1 to {LARGEST:,}."
        )
    return found


def _parsed(batch: int | str | Sequence[int]) -> list[int]:
    if isinstance(batch, bool):
        raise TypeError
    if isinstance(batch, int):
        return [batch]
    if isinstance(batch, str):
        first, dots, last = batch.partition("..")
        least, most = int(first), int(last) if dots else int(first)
        return sizes(least, most) if 1 <= least <= most <= LARGEST else []
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in batch):
        raise TypeError
    return sorted(set(batch))
