"""Compress: hold values in 8 bits between forward and backward, decided with keeping and recomputing (planner/remat)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.machine.target import Target
from effcompile.ops.compress import packed_bytes
from effcompile.passes.training.levers import Rates
from effcompile.schedule.ways import Codec, Way

_PROBE_ELEMENTS = 1 << 20

_OPS = torch.ops.effcompile
COMPRESS = Way(
    name="compress", by="compress", said="in 8 bits", exact=False, without="nothing is compressed",
    codec=Codec(pack=_OPS.compress8.default, unpack=_OPS.decompress8.default, packed_bytes=packed_bytes),
)  # fmt: skip


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
    known: ClassVar[tuple[Way, ...]] = (COMPRESS,)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"compress.share = {self.share!r}: give a number from 0 to 1.")

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that are proposed."""
        return self.known

    def takes(self, value: Tensor, learned: bool) -> bool:
        """Floats that depend on a parameter: the extremes of masks and positions are not held."""
        return learned and value.is_floating_point() and value.dtype != torch.float64

    def rates(self, target: Target, here: bool) -> Rates:
        """Measured here; elsewhere by bytes: fp32 read and written about four times."""
        elsewhere = 32 / (target.memory_bandwidth * target.efficiency)
        return Rates(pack={way.name: _packing(way, target.device) if here else elsewhere for way in self.ways})


@cache
def _packing(way: Way, device: str) -> float:
    """Seconds per element of packing or unpacking, the mean of both: the fastest of three runs."""
    assert way.codec is not None
    x = torch.ones(_PROBE_ELEMENTS, device=device)
    times = []
    for _ in range(3):
        start = perf_counter()
        again = way.codec.unpack(way.codec.pack(x, [1]), [_PROBE_ELEMENTS], [1], x.dtype)
        float(again[0])  # waits for a device
        times.append(perf_counter() - start)
    return min(times) / 2 / _PROBE_ELEMENTS
