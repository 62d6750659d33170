"""What packages are installed: their versions, and what they register.

That is read once for as long as no package comes or goes, for to read it takes tens of milliseconds.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, in the order of importlib.metadata."""
    return _read(group, tuple((place, _changed(place)) for place in sys.path))


def _changed(place: str) -> int:
    """When something was last put into the folder or taken out of it; 0 where there is none."""
    try:
        return Path(place).stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=32)
def _read(group: str, places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Read anew where `places` differ, which metadata looks at itself."""
    return tuple(metadata.entry_points(group=group))


def versions() -> dict[str, str]:
    """Package → version, of what a plan's figures depend on."""
    found = {}
    for package in ("effcompile", "torch", "onnxruntime", "openvino", "z3-solver", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
