"""Bitmask: hold Boolean values as bits between forward and backward, decided with keeping and recomputing
(planner/remat).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.machine.target import Target
from effcompile.ops.bitmask import packed_bytes
from effcompile.passes.training.levers import Rates, packing_seconds
from effcompile.schedules.ways import Codec, Way

BITMASK = Way(
    name="bitmask",
    by="bitmask",
    said="as bits",
    without="no mask is held as bits",
    codec=Codec(
        pack=torch.ops.effcompile.to_bits.default,
        unpack=torch.ops.effcompile.to_booleans.default,
        packed_bytes=packed_bytes,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmask:
    """Dropout's masks and the signs of activations in an eighth of their bytes, exact; worth it where drawing
    them again takes longer.

    Source: Gist (ISCA 2018) for ReLU, ActNN (arXiv 2104.14129) for dropout.

    Attributes:
        share: values below this share of their block's bytes are not proposed: they only make the search
            longer.
    """

    share: float = 0.01

    name: ClassVar[str] = "bitmask"
    exact: ClassVar[bool] = True
    known: ClassVar[tuple[Way, ...]] = (BITMASK,)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"bitmask.share = {self.share!r}: give a number from 0 to 1.")

    @property
    def ways(self) -> tuple[Way, ...]:
        """The one that is proposed."""
        return self.known

    def takes(self, value: Tensor, learned: bool) -> bool:
        """Booleans."""
        return value.dtype == torch.bool

    def rates(self, target: Target, here: bool) -> Rates:
        """Measured here; elsewhere by bytes: a byte an element read or written, and the passes over eight of
        them about twice.
        """
        elsewhere = 3 / (target.memory_bandwidth * target.efficiency)
        return Rates(
            pack={BITMASK.name: packing_seconds(BITMASK, torch.bool, target.device) if here else elsewhere}
        )
