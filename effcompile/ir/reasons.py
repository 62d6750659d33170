"""Why an option was not taken, as data: how much slower, how far above the budget, or what it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from effcompile.core.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower:
    """The fastest plan with it takes so many seconds more; `at_least`: by a bound, it was not solved for that."""

    seconds: float
    at_least: bool = False

    def __str__(self) -> str:
        if self.at_least:
            return f"takes at least {format_seconds(self.seconds)} more a step"
        return f"the fastest plan with it takes {format_seconds(self.seconds)} more a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudget:
    """No plan with it is within the budget; the nearest needs so many bytes."""

    needed: int

    def __str__(self) -> str:
        return f"at least {format_bytes(self.needed)} with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """It cannot be had, or was not looked at."""

    text: str

    def __str__(self) -> str:
        return self.text


Reason = Slower | OverBudget | Unsupported
