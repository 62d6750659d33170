"""Options of passes as text: read as the types of the passes' fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from effcompile.core.errors import UsageError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def value_of(cls: type[Any], name: str, option: str, equals: str, text: str) -> Any:
    """The text of an option as its field's type."""
    allowed = [f.name for f in fields(cls)]
    listing = ", ".join(f"{name}.{field}" for field in allowed) or "none"
    if option not in allowed or not equals:
        raise UsageError(
            f"The pass {name!r} has no option {option!r}. Write NAME.OPTION=VALUE; options: {listing}."
        )
    kind = get_type_hints(cls)[option]
    try:
        return _parse(kind, text)
    except ValueError as error:
        raise UsageError(
            f"{name}.{option} = {text!r} is not {_describe(kind)}. Options of {name!r}: {listing}."
        ) from error


def _parse(kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(text)
        return text.lower() in _TRUE
    if kind in (int, float, str):
        return kind(text)
    made: type[Any] = {tuple[int, ...]: int, tuple[float, ...]: float}.get(kind, str)
    return tuple(made(part.strip()) for part in text.split(",") if part.strip())


def _describe(kind: Any) -> str:
    names: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    names |= {
        tuple[float, ...]: "a list of numbers like 0.5,0.9",
        tuple[int, ...]: "a list of whole numbers like 8,4",
    }
    return names.get(kind, "a list like a,b,c")
