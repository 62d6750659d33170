"""Which bytes of a mapping are resident, as Linux says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def resident_at(address: int) -> int:
    """Resident bytes of the mapping that an address lies in."""
    for low, high, _, nbytes in _mappings():
        if low <= address < high:
            return nbytes
    raise AssertionError("no such mapping")


def resident_of(suffix: str) -> int:
    """Resident bytes of all mappings of files whose names end so."""
    found = [nbytes for _, _, name, nbytes in _mappings() if name.endswith(suffix)]
    assert found, "no such mapping"
    return sum(found)


def _mappings() -> Iterator[tuple[int, int, str, int]]:
    """(first address, the one behind the last, what is mapped, resident bytes)."""
    low, high, name = 0, 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            name = line.rpartition(" ")[2]
        elif first == "Rss:":
            yield low, high, name, int(rest.split()[0]) << 10
