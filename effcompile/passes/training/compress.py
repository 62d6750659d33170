"""Compress: hold values in few bits between forward and backward, decided with keeping and recomputing
(planner/remat).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.machine.target import Target
from effcompile.ops.compress import BITS, packed_bytes
from effcompile.passes.training.levers import Rates, packing_seconds
from effcompile.schedules.ways import Codec, Way


def _way(bits: int) -> Way:
    """Values in so many bits; those in 8 have the lever's name."""
    pack, unpack = (
        getattr(torch.ops.effcompile, f"{name}{bits}").default for name in ("compress", "decompress")
    )
    return Way(
        name="compress" + (str(bits) if bits < 8 else ""), by="compress", said=f"in {bits} bits", exact=False,
        without="nothing is compressed" + (f" to {bits} bits" if bits < 8 else ""),
        codec=Codec(pack=pack, unpack=unpack, packed_bytes=partial(packed_bytes, bits=bits)),
    )  # fmt: skip


_WAYS = {bits: _way(bits) for bits in BITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """Activation compressed training (ActNN, arXiv 2104.14129; Mesa, arXiv 2111.11124; GACT, arXiv
    2206.11357).

    In 8 bits values take about a quarter of the bytes of fp32, in 4 an eighth, in 2 a sixteenth.

    Not exact: proposed only where the goal allows error. The gradient's error is measured, and a plan that
    exceeds the goal's is made again without the fewest bits that it has. Only values that depend on a
    parameter are packed, not masks or positions.

    Attributes:
        bits: 8, 4, 2: those to choose from.
        share: values below this share of their block's bytes are not proposed: they only make the search
            longer.
    """

    bits: tuple[int, ...] = (8,)
    share: float = 0.02

    name: ClassVar[str] = "compress"
    exact: ClassVar[bool] = False
    known: ClassVar[tuple[Way, ...]] = tuple(_WAYS.values())

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"compress.share = {self.share!r}: give a number from 0 to 1.")
        if not self.bits or not set(self.bits) <= set(BITS):
            raise UsageError(
                f"compress.bits = {','.join(map(str, self.bits))}: give some of {', '.join(map(str, BITS))}."
            )

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that are proposed."""
        return tuple(way for bits, way in _WAYS.items() if bits in self.bits)

    def takes(self, value: Tensor, learned: bool) -> bool:
        """Floats that depend on a parameter: the extremes of masks and positions are not held."""
        return learned and value.is_floating_point() and value.dtype != torch.float64

    def rates(self, target: Target, here: bool) -> Rates:
        """Measured here; elsewhere by bytes: fp32 read and written about four times."""
        elsewhere = 32 / (target.memory_bandwidth * target.efficiency)
        return Rates(
            pack={
                way.name: packing_seconds(way, torch.float32, target.device) if here else elsewhere
                for way in self.ways
            }
        )
