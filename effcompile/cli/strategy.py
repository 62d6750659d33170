"""`--strategy "dp=8,tp=8,pp=4"`: a strategy as text. What is left out is free."""

from __future__ import annotations

from dataclasses import fields
from typing import cast

from effcompile.core.errors import UsageError, clipped
from effcompile.ir.strategy import Strategy, StrategyFields, check_fields

_NUMBERS = {f.name for f in fields(Strategy) if f.type in ("int", int)}
_FLAGS = {"0": False, "1": True}


def parse_strategy(text: str) -> StrategyFields:
    """The fields that a text gives; `cuts=3/3/2` are layers of stages.

    Raises:
        UsageError: not of that form. UnknownNameError: no such field.
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if not equals or not name or not value:
            raise UsageError(
                f"--strategy: {clipped(repr(part.strip()))} is not NAME=VALUE. Write it like "
                "dp=8,tp=8,micro_batch=2."
            )
        if name in found:
            raise UsageError(f"--strategy gives {name} twice.")
        found[name] = _value(name, value)
    check_fields(found)
    return cast("StrategyFields", found)


def _value(name: str, value: str) -> object:
    if name == "cuts":
        parts = value.split("/")
        return tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)
    if name == "sp":
        return _FLAGS.get(value, value)
    return int(value) if name in _NUMBERS and value.isascii() and value.isdigit() else value
