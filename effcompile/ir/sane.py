"""What the types of a plan do not say: its figures are finite, below what any machine has, and not negative
where that has no meaning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

#: More bytes, seconds or parameters than this no plan is of.
_MOST = 1 << 63
#: Plans nest as deep as their dataclasses do, and a setting is a word or a number.
_DEEPEST = 20
#: Figures of a certificate, whose objective may be a difference; costs of an option that takes away, a fusion
#: or a merge, and what reasons say of them; limits of a mask.
_SIGNED = (
    "objective", "bound", "gap", "cost.seconds", "cost.weight_bytes", "cost.bytes_kept",
    "cost.bytes_transient", "cost.bytes_link", "cost.roof_seconds", "reason.seconds", "reason.against",
    "why.seconds", "why.against", "note.change", "note.cosine", "lo.offset", "hi.offset", "ahead",
)  # fmt: skip
#: What stands in the text of a reason is of either sign.
_IN_TEXT = re.compile(r"\.figures\[\d+\]$")


def objection(plan: object) -> str | None:
    """The first figure of a plan that cannot be one, in words; None where all can."""
    for path, value in _figures(plan, "", 0):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path} = {value} is not a number"
        if abs(value) > _MOST:
            return f"{path} is larger than any machine's"
        if value < 0 and not path.endswith(_SIGNED) and not _IN_TEXT.search(path):
            return f"{path} = {value} is negative"
    return None


def _figures(value: object, path: str, depth: int) -> Iterator[tuple[str, float]]:
    if depth > _DEEPEST:
        raise RecursionError(f"{path[:80]} nests deeper than a plan does")
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _figures(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _figures(item, f"{path}[{index}]", depth + 1)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _figures(getattr(value, field.name), f"{path}.{field.name}".lstrip("."), depth + 1)
