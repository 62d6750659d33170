"""What pip leaves of a package beside its modules, so that its entry points are found."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent / "third_party"


def declared(group: str) -> dict[str, str]:
    """The entry points that the package's pyproject.toml declares in a group."""
    entries: dict[str, str] = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"][
        "entry-points"
    ][group]
    return entries


def install(folder: Path, group: str, entry_points: Mapping[str, str]) -> None:
    """The package as it is there once it is installed, with these entry points."""
    info = folder / "effcompile_unscale-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: effcompile-unscale\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
