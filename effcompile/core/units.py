"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re
from numbers import Real
from typing import cast

from effcompile.core.errors import UsageError, clipped

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: str | int | float, *, name: str = "memory") -> int:
    """Bytes from `6GiB`, `900 MB`, `1.5g` or a plain number.

    KB, MB, GB are decimal; KiB, MiB, GiB and bare K, M, G are binary.

    Raises:
        UsageError: not a size, not finite, or not positive.
    """
    size = _number_of_bytes(value)
    if size is None or size != size:
        raise UsageError(
            f"{name} = {clipped(repr(value))} is not a size. Write it like 6GiB, 900MB or a number of bytes."
        )
    if size < 1:
        raise UsageError(f"{name} = {value!r} must be at least one byte.")
    if size >= 1 << 63:
        raise UsageError(
            f"{name} must be less than 2^63 bytes, which no machine has. Leave it out for no limit."
        )
    return int(size)


def _number_of_bytes(value: object) -> float | None:
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        unit = _BYTE_UNITS.get(match[2].lower()) if match else None
        return None if match is None or unit is None else float(match[1]) * unit
    return cast("float", value) if isinstance(value, Real) and not isinstance(value, bool) else None


def format_bytes(size: float) -> str:
    """Bytes in the largest binary unit that keeps at least one digit before the point: `1.18 GiB`."""
    sign, size = ("−", -size) if size < 0 else ("", size)
    for unit, digits in (("B", 0), ("KiB", 0), ("MiB", 1), ("GiB", 2)):
        if size < 1000 or unit == "GiB":
            return f"{sign}{size:.{digits}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Seconds with three significant digits in s, ms or µs: `38.4 ms`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{_three(seconds / scale)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def format_error(error: float) -> str:
    """A relative error: `0`, `2.3e-2`."""
    return "0" if error == 0 else f"{error:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def format_count(count: float) -> str:
    """A count with a metric prefix: `124 M`, `22.4 G`."""
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= scale:
            return f"{_three(count / scale)}{unit}"
    return f"{count:.0f}"


def _three(value: float) -> str:
    """Three significant digits without an exponent for 0.001 ≤ |value| < 10⁶."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
