"""How a learning rate follows the batch: a law, not a measurement.

With a batch that grows k-fold, the learning rate of plain SGD grows k-fold (Goyal et al. 2017, arXiv
1706.02677, section 2.1); that of optimizers which divide by a moment of the gradient, or take its sign or
(Muon) that of its singular values, grows by the square root of k (Malladi et al. 2022, arXiv 2205.10287,
section 5; LAMB: You et al. 2019, arXiv 1904.00962, section 4). Both hold far below the critical batch C.
Where that is known, the growth k from a batch B to k B is that of 1 / (1 + C / B) instead, which ends at 1 +
C / B (McCandlish et al. 2018, arXiv 1812.06162, equation 2.6, and its square root as appendix E.2 has it for
Adam).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from effcompile.core.errors import UsageError

LINEAR, ROOT = "linear", "square-root"
_ROOTS = (
    "adadelta", "adafactor", "adagrad", "adam", "adam8bit", "adamax", "adamw", "adamw8bit", "lamb", "lion",
    "lion8bit", "muon", "nadam", "radam", "rmsprop",
)  # fmt: skip
_LAWS = {"lars": LINEAR, "sgd": LINEAR, **dict.fromkeys(_ROOTS, ROOT)}


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate at a batch that it was found at.

    `critical`: the critical batch, where it was measured (runs/noise.py).
    """

    rate: float
    batch: int
    critical: float | None = None

    @classmethod
    def of(cls, given: Sequence[float]) -> LearningRate:
        """From a user's pair.

        Raises:
            UsageError: not (a positive rate, a batch of at least 1), and a positive critical batch behind
                them or none.
        """
        try:
            rate, batch, *more = given
            good = math.isfinite(rate) and rate > 0 and batch >= 1 and int(batch) == batch
            good = (
                good and len(more) < 2 and all(math.isfinite(critical) and critical > 0 for critical in more)
            )
        except (TypeError, ValueError):
            good = False
        if not good:
            raise UsageError(
                f"lr = {given!r}: give a learning rate and the batch that it is good for, as (3e-4, 256), "
                "and where it was measured the critical batch behind them."
            )
        return cls(float(rate), int(batch), float(more[0]) if more else None)

    def at(self, batch: int, optimizer: str) -> float:
        """The learning rate at another batch, for an optimizer's class."""
        grown = batch / self.batch
        if self.critical is not None:
            grown = (1 + self.critical / self.batch) / (1 + self.critical / batch)
        return self.rate * (grown if law(optimizer) is LINEAR else math.sqrt(grown))


def law(optimizer: str) -> str:
    """The law of an optimizer's class.

    Raises:
        UsageError: none is known.
    """
    found = _LAWS.get(optimizer.lower())
    if found is None:
        raise UsageError(
            f"No law is known for how the learning rate of {optimizer} follows the batch. Leave lr out, and "
            f"set the rate yourself. Laws are known of: {', '.join(sorted(_LAWS))}."
        )
    return found
