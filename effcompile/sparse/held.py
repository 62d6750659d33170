"""What the controller needs of a weight under a pattern, however it is held: dense under a mask, or as
blocks.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from effcompile.sparse.moments import Change
from effcompile.sparse.movement import Movement

__all__ = ["Held"]


class Held(Protocol):
    """The weight (O, I) of one linear layer, of which blocks of a grid (R, C) are active."""

    name: str
    block: int
    shape: tuple[int, int]
    dense_gradient: Tensor | None

    @property
    def mask(self) -> Tensor:
        """Bool (R, C), on the CPU: the active blocks."""

    @property
    def execution(self) -> str:
        """How products with it are computed: "masked" or "blocks"."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer holds."""

    @property
    def room(self) -> int:
        """The most blocks it may hold, however it is held: the course of a training does not
        depend on that.
        """

    @property
    def layer(self) -> nn.Module:
        """The module that computes with it."""

    def scores(self) -> Tensor:
        """The L1 norm of every block, (R, C), on the CPU; 0 for inactive ones."""

    def dense(self) -> Tensor:
        """The whole weight, (O, I)."""

    def collect(self, on: bool) -> None:
        """From now on, sum the dense gradient in `dense_gradient`, (O, I); off: forget it."""

    def move(self, movement: Movement) -> Change:
        """Take the new pattern, the weight with it; the change that moments and gradient must undergo is
        returned.
        """

    def set_mask(self, mask: Tensor) -> None:
        """Take a pattern without touching the weight: it is loaded too."""

    def enforce(self) -> None:
        """Zero what lies outside the pattern."""

    def release(self) -> None:
        """Let go of the layer."""
