"""Versions of packages, as they say them."""

from __future__ import annotations

import re


def released(version: str) -> tuple[int, int] | None:
    """The first two numbers; None where it does not begin with them ("nightly")."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
