"""Offload: hold values on the host between forward and backward, decided with keeping and recomputing
(planner/remat).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.core.units import parse_bytes
from effcompile.machine.memory import free_bytes
from effcompile.machine.rates import kept_rates
from effcompile.machine.target import Target
from effcompile.ops.offload import link_seconds
from effcompile.passes.training.levers import Rates
from effcompile.schedules.ways import Way

OFFLOAD = Way(name="offload", by="offload", said="on the host", on_host=True, without="nothing is offloaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Copies over the link to the host and back, exact to the bit; worth it where the link is fast or memory
    dear.

    Source: POFO (NeurIPS 2021) and OffMate (HAL 04660745) for the link's prefix and suffix sums; what is new
    is that it is decided per storage with recomputation and compression, and that bytes bound the true peak.

    Attributes:
        host: host memory at the most, e.g. "8GiB"; "": what is free in `folder` (here), no limit (another
            target).
        bandwidth: of the link, per second and in one direction, e.g. "12GB"; "": measured here, else the
            target's.
        folder: where the pool's file lies (ops/offload.py); "": the system's folder for temporary files.
        share: values below this share of their block's bytes are not proposed: they only make the search
            longer.
    """

    host: str = ""
    bandwidth: str = ""
    folder: str = ""
    share: float = 0.02

    name: ClassVar[str] = "offload"
    exact: ClassVar[bool] = True
    known: ClassVar[tuple[Way, ...]] = (OFFLOAD,)

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
        return (
            parse_bytes(self.bandwidth.removesuffix("/s"), name="offload.bandwidth")
            if self.bandwidth
            else None
        )

    @property
    def ways(self) -> tuple[Way, ...]:
        """The one that is proposed."""
        return self.known

    def takes(self, value: Tensor, learned: bool) -> bool:
        """Any value."""
        return True

    def rates(self, target: Target, here: bool) -> Rates:
        """Of the link as it was given, measured here, or the target's; and room on the host.

        Raises:
            UsageError: the target's link carries nothing.
        """
        given = self.bytes_per_second
        if given is None and not here and not target.link_bandwidth > 0:
            raise UsageError(
                f"The link of the target {target.name!r} has {target.link_bandwidth:g} B/s: nothing can be "
                "offloaded over it. Give offload.bandwidth, mend the target, or leave the pass offload out."
            )
        out, back = (
            (1 / given, 1 / given)
            if given
            else _link(self.folder, target.device)
            if here
            else (1 / target.link_bandwidth,) * 2
        )
        host = _room(self.folder, target.device) if here and self.host_bytes is None else self.host_bytes
        return Rates(out=out, back=back, host_bytes=host, folder=self.folder)


@cache
def _link(folder: str, device: str) -> tuple[float, float]:
    disk = os.stat(folder or tempfile.gettempdir()).st_dev
    out, back = kept_rates(f"link to {disk}", device, lambda: link_seconds(folder, device))
    return out, back


def _room(folder: str, device: str) -> int | None:
    """Bytes that a pool may take: what is free on the folder's disk; for pinned memory, what the system
    leaves to this process.
    """
    if device == "cpu":
        return shutil.disk_usage(folder or tempfile.gettempdir()).free
    return free_bytes()
