"""Which bytes of a mapping are resident, as Linux says."""

from __future__ import annotations

from pathlib import Path


def resident_at(address: int) -> int:
    """Resident bytes of the mapping that an address lies in."""
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            there = low <= address < high
        elif there and first == "Rss:":
            return int(rest.split()[0]) << 10
    raise AssertionError("no such mapping")
