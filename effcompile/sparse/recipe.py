"""The recipe of a sparse training run: its numbers, their defaults, and when the pattern moves.

Defaults are those of Dietrich et al. 2021 (arXiv 2108.06277): random regrowth, ratio 0.5 with cosine decay,
uniform sparsity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from effcompile.core.errors import UsageError

__all__ = ["Recipe", "learning_rate_factor"]

Growth = Literal["random", "gradient"]
Execution = Literal["auto", "blocks", "masked"]


def learning_rate_factor(sparsity: float) -> float:
    """lr(s) / lr(0) = exp(1.969 s² + 0.2905 s): 6.4 at s = 0.9 (Dietrich et al. 2021, fitted on
    BERT-Medium).
    """
    return math.exp(1.969 * sparsity**2 + 0.2905 * sparsity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a controller was asked for; checked when made.

    sparsity: the share of weights that are zero, in [0, 1).
    block: side of a block.
    growth: "random" (SET) or "gradient" (RigL, which collapsed on BERT in Dietrich et al., fig. 11).
    updates: how often the pattern moves; 0: static. None: 160 for single weights, 80 for blocks (their table
    A.2). steps: the training steps that the updates are spread over; None: one update every 100 steps.
    prune_ratio: the share of blocks exchanged at the first update; falls to 0 as a cosine. distribution:
    "uniform" sparsity, or "global": layers compete for blocks. balanced: equally many blocks in every block
    row. initial: the first pattern: "random", "magnitude" (the largest weights), "dense" (all; a ticket is
    drawn later) or "given". execution: "blocks" (block-sparse kernels), "masked" (dense products of masked
    weights) or "auto". seed: of the controller's own random generator.
    """

    sparsity: float = 0.9
    block: int = 16
    growth: Growth = "random"
    updates: int = 80
    steps: int | None = None
    prune_ratio: float = 0.5
    distribution: Literal["uniform", "global"] = "uniform"
    balanced: bool = False
    initial: Literal["random", "magnitude", "dense", "given"] = "random"
    execution: Execution = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise UsageError(
                f"sparsity = {self.sparsity!r} must be at least 0 and below 1, such as 0.9 for one weight "
                "in ten."
            )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise UsageError(f"block = {self.block!r} must be a whole number from 1, such as 16.")
        if not 0 < self.prune_ratio <= 1:
            raise UsageError(
                f"prune_ratio = {self.prune_ratio!r} must be above 0 and at most 1, such as 0.5. For a "
                "static pattern: updates=0."
            )
        if self.updates < 0:
            raise UsageError(f"updates = {self.updates!r} must be 0 (a static pattern) or more.")
        if self.steps is not None and self.steps <= self.updates:
            raise UsageError(
                f"steps = {self.steps!r} leaves no training between {self.updates} updates. Give more "
                "steps or fewer updates."
            )
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise UsageError(
                    f"{field} = {getattr(self, field)!r} must be one of {', '.join(map(repr, allowed))}."
                )
        if self.initial == "dense" and self.execution == "blocks":
            raise UsageError(
                "initial='dense' with execution='blocks' would hold every block. Use execution='masked' "
                "until the ticket is drawn."
            )

    @property
    def interval(self) -> float:
        """Steps from one update to the next; the last comes one interval before the end."""
        return 100.0 if self.steps is None else self.steps / (self.updates + 1)

    def update_step(self, update: int) -> int | None:
        """The step (from 1) after which update number `update` (from 0) is due; None after the last."""
        return math.floor(self.interval * (update + 1)) if update < self.updates else None


_CHOICES: dict[str, tuple[str, ...]] = {
    "growth": get_args(Growth),
    "distribution": ("uniform", "global"),
    "initial": ("random", "magnitude", "dense", "given"),
    "execution": get_args(Execution),
}
