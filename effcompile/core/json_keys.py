"""Names that stand twice in one object of a JSON text. Readers take the last one without a word, so that
the text does not say what it seems to.
"""

from __future__ import annotations

import json
from typing import Any


class _RepeatedError(Exception):
    """Ends the reading at the first one."""


def repeated_key(content: bytes) -> str | None:
    """The first name that stands twice in one object of a text that is JSON; None where there is none."""
    try:
        json.loads(content, object_pairs_hook=_once, parse_int=_nothing, parse_float=_nothing)
    except _RepeatedError as found:
        return str(found)
    return None


def _once(pairs: list[tuple[str, Any]]) -> None:
    """What an object holds is not kept: of objects in objects only the names are looked at."""
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _RepeatedError(name)
        seen.add(name)


def _nothing(number: str) -> None:
    """Digits are not read: there may be more of them than Python makes a number of."""
