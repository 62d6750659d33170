"""What a phrase is made of: texts, figures, names of sites; and how those of reasons that are
alike are one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from effcompile.report.names import collapse, printed

#: Names of sites that one phrase lists.
_PLACES = 3

Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in a phrase, and how it is printed."""

    value: float
    show: Show


@dataclass(frozen=True, slots=True)
class SiteName:
    """The name of a site in a phrase."""

    name: str


Part = str | Figure | SiteName
Phrase = tuple[Part, ...]


def nature(part: Part) -> Hashable:
    """What alike phrases have in common at this place."""
    return part if isinstance(part, str) else part.show if isinstance(part, Figure) else SiteName


def spread(parts: Sequence[Part]) -> str:
    """The parts that alike phrases have at one place, as one."""
    first = parts[0]
    if isinstance(first, str):
        return first
    if isinstance(first, SiteName):
        places = printed(collapse(part.name for part in parts if isinstance(part, SiteName)))
        return ", ".join(places[:_PLACES]) + (
            f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        )
    values = [part.value for part in parts if isinstance(part, Figure)]
    return _span(first.show(min(values)), first.show(max(values)))


def _span(low: str, high: str) -> str:
    """`1.2–3.4 ms`, `800 µs–3.4 ms`, `12–34%`."""
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    if number and high.endswith(f" {unit}"):
        return f"{number}–{high}"
    return f"{low.removesuffix('%')}–{high}" if high.endswith("%") else f"{low}–{high}"


def joined(said: Sequence[Phrase], between: str = ", ") -> Phrase:
    """One phrase of several."""
    found: list[Part] = []
    for number, each in enumerate(said):
        found += [between] * bool(number)
        found += each
    return tuple(found)
