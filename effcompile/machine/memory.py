"""How much memory is left to this process, as far as the system tells: the machine's, a control group's, a
limit's, a GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_GROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    return _of_process("rss")


def free_bytes(device: str = "cpu") -> int | None:
    """The least that the machine, the control group and the address space's limit leave on a type of device;
    None: nobody says.
    """
    # who asks for a GPU's has loaded it; the planner asks, too, which knows no torch
    torch = sys.modules.get("torch")
    if device == "cuda" and torch is not None and torch.cuda.is_available():
        # what its allocator holds without using it is free, too
        free, size = map(int, torch.cuda.mem_get_info())
        reserved = int(torch.cuda.memory_reserved())
        own = int(share_of_gpu(torch) * size) - reserved
        return max(0, min(free, own)) + reserved - int(torch.cuda.memory_allocated())
    return min(
        (n for n in (_of_machine(), _of_address_space(), *_of_groups()) if n is not None), default=None
    )


def share_of_gpu(torch: Any) -> float:
    """Of the current GPU's memory, which the user lets this process have (`set_per_process_memory_fraction`);
    torch tells it from 2.8 on.
    """
    told = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if told is None else float(told())


def give_back() -> None:
    """Return to the system what was freed: glibc keeps the pages of a closed session of a large model, as
    many bytes again as it has.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _of_machine() -> int | None:
    try:
        found = psutil.virtual_memory()
    except (OSError, RuntimeError, ValueError):  # a container without /proc
        return None
    return min(found.available, found.total)


def _of_address_space() -> int | None:
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(0, limit - _of_process("vms"))


def _of_process(field: str) -> int:
    """Bytes of this process: "vms" the address space, "rss" what is resident; 0 where the system does not
    say.
    """
    try:
        return int(getattr(psutil.Process().memory_info(), field))
    except (psutil.Error, OSError):
        return 0


def _of_groups(root: Path = _GROUPS, of: Path = Path("/proc/self/cgroup")) -> Iterator[int | None]:
    """What is left in the control group and in all around it, version 2 or 1; pages that the system may drop
    count as free.
    """
    try:
        lines = [line.split(":", 2) for line in of.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0" and not controllers:
            top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage, cache = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield _left(folder, limit, usage, cache)
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max"
        return None
    return max(0, most - used + int(kept.get(cache, 0)))
