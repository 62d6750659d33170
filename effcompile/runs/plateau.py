"""When a loss no longer falls: the mean of the last window of steps is not lower than that of the window
before by more than a share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Windows are this share of a stage's steps, and of at least so many.
_SHARE, _LEAST = 0.1, 5
#: A fall by less than this share of the loss is none.
_FALL = 0.005


@dataclass(slots=True, kw_only=True)
class Plateau:
    """`steps`: of the stage at the most. `losses`: the last of two windows."""

    steps: int
    losses: list[float] = field(default_factory=list)

    @property
    def window(self) -> int:
        return max(_LEAST, round(_SHARE * self.steps))

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        del self.losses[: -2 * self.window]

    @property
    def reached(self) -> bool:
        if len(self.losses) < 2 * self.window:
            return False
        before, last = sum(self.losses[: self.window]), sum(self.losses[self.window :])
        return before - last < _FALL * abs(before)
