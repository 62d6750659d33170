"""Compress: hold values in 8 bits between forward and backward, decided with keeping and recomputing (planner/remat)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effcompile.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """Activation compressed training (ActNN, arXiv 2104.14129; GACT, arXiv 2206.11357): about a quarter of the bytes of fp32.

    Not exact: proposed only where the goal allows error. The gradient's error is measured, and a plan that exceeds the
    goal's is made again without it. Only values that depend on a parameter are packed, not masks or positions.

    Attributes:
        share: values below this share of their block's bytes are not proposed: they only make the search longer.
    """

    share: float = 0.02

    name: ClassVar[str] = "compress"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"compress.share = {self.share!r}: give a number from 0 to 1.")
