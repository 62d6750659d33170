"""What it takes to move values: seconds over the link and to pack, room on the host; measured on this machine, else the target's."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from time import perf_counter

import torch

from effcompile.core.errors import UsageError
from effcompile.machine.memory import free_bytes
from effcompile.machine.target import Target
from effcompile.ops.compress import compress, decompress
from effcompile.ops.offload import link_seconds
from effcompile.passes.training.levers import Levers, Rates

_PROBE_ELEMENTS = 1 << 20


def rates_of(levers: Levers, target: Target, *, here: bool) -> Rates:
    """Rates for these levers on the target. `here`: it is this machine.

    Raises:
        UsageError: the target's link carries nothing.
    """
    offload = levers.offload
    out = back = 0.0
    host = None
    if offload is not None:
        given = offload.bytes_per_second
        if given is None and not here and not target.link_bandwidth > 0:
            raise UsageError(
                f"The link of the target {target.name!r} has {target.link_bandwidth:g} B/s: nothing can be offloaded over it. "
                "Give offload.bandwidth, mend the target, or leave the pass offload out."
            )
        out, back = (1 / given, 1 / given) if given else _link(offload.folder, target.device) if here else (1 / target.link_bandwidth,) * 2
        host = _room(offload.folder, target.device) if here and offload.host_bytes is None else None
    pack = 0.0
    if levers.compress is not None:  # elsewhere by bytes: fp32 read and written about four times
        pack = _packing(target.device) if here else 32 / (target.memory_bandwidth * target.efficiency)
    return Rates(out=out, back=back, pack=pack, call=target.launch_seconds, host_bytes=host, beside=target.device != "cpu")


@cache
def _link(folder: str, device: str) -> tuple[float, float]:
    return link_seconds(folder, device)


@cache
def _packing(device: str) -> float:
    """Seconds per element of packing or unpacking, the mean of both: the fastest of three runs."""
    x = torch.ones(_PROBE_ELEMENTS, device=device)
    times = []
    for _ in range(3):
        start = perf_counter()
        again = decompress(compress(x, [1]), [_PROBE_ELEMENTS], [1], x.dtype)
        float(again[0])  # waits for a device
        times.append(perf_counter() - start)
    return min(times) / 2 / _PROBE_ELEMENTS


def _room(folder: str, device: str) -> int | None:
    """Bytes that a pool may take: what is free on the folder's disk; for pinned memory, what the system leaves to this process."""
    if device == "cpu":
        return shutil.disk_usage(folder or tempfile.gettempdir()).free
    return free_bytes()
