"""Offload: hold values on the host between forward and backward, decided with keeping and recomputing (planner/remat)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effcompile.core.errors import UsageError
from effcompile.core.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Copies over the link to the host and back, exact to the bit; worth it where the link is fast or memory dear.

    Source: POFO (NeurIPS 2021) and OffMate (HAL 04660745) for the link's prefix and suffix sums; what is new is that it is
    decided per storage with recomputation and compression, and that bytes bound the true peak.

    Attributes:
        host: host memory at the most, e.g. "8GiB"; "": what is free in `folder` (here), no limit (another target).
        bandwidth: of the link, per second and in one direction, e.g. "12GB"; "": measured here, else the target's.
        folder: where the pool's file lies (ops/offload.py); "": the system's folder for temporary files.
        share: values below this share of their block's bytes are not proposed: they only make the search longer.
    """

    host: str = ""
    bandwidth: str = ""
    folder: str = ""
    share: float = 0.02

    name: ClassVar[str] = "offload"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"offload.share = {self.share!r}: give a number from 0 to 1.")
        _ = self.host_bytes, self.bytes_per_second  # refused here if they are no sizes

    @property
    def host_bytes(self) -> int | None:
        """The limit that was given, in bytes."""
        return parse_bytes(self.host, name="offload.host") if self.host else None

    @property
    def bytes_per_second(self) -> int | None:
        """The bandwidth that was given."""
        return parse_bytes(self.bandwidth.removesuffix("/s"), name="offload.bandwidth") if self.bandwidth else None
