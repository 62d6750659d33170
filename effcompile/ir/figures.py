"""Whole-model figures of a plan: predicted and measured totals, the solver's proof, what was compared, which
backends were considered.
"""

from __future__ import annotations

from dataclasses import dataclass

from effcompile.core.errors import UsageError, clipped
from effcompile.core.reason_kinds import KINDS
from effcompile.core.reasons import Reason

_REASONS = frozenset(KINDS.values())


def check_reasons(place: str, *reasons: Reason | None) -> None:
    """Refuse what is none of the closed set: a pass of an installed package may give a sentence.

    Raises:
        UsageError: it is none.
    """
    for reason in reasons:
        if reason is not None and type(reason) not in _REASONS:
            raise UsageError(
                f"The reason of {place} is {clipped(repr(reason), 120)}, a {type(reason).__name__}. Give one "
                "of effcompile.core.reasons, for a sentence Because(text) or Unsupported(text)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Whole-model figures. None where not predicted or not measured in this run.

    `seconds` is per call (measured: the median); `error` relative L2 of the outputs. In training `seconds` is
    one step (forward and backward), `peak_bytes` its highest instant, and `error` 0 when loss and gradients
    are bit-identical. `roof_seconds`: of `seconds`, what the arithmetic of the products takes at the
    machine's peak rates.
    """

    seconds: float | None = None
    weight_bytes: int | None = None
    peak_bytes: int | None = None
    error: float | None = None
    roof_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The solver's proof.

    `gap` 0.01 means: z3 found "cheaper than (1 − 0.01) × this" unsatisfiable under the same limits and costs.
    """

    status: str  # "optimal within gap" | "feasible, bound not proven" | "only one alternative"
    objective: float
    bound: float
    gap: float
    sites: int
    alternatives: int
    seconds: float
    solver: str
    rounds: int = 1  # solves until the measured error was within the limit
    error_scale: float = 1.0  # measured / predicted squared error that the last round used
    rounding_scale: float = 1.0  # the same of what is rounded to 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verification: what was compared, the figure, the limit."""

    name: str
    error: float
    limit: float
    note: Reason | None = None

    def __post_init__(self) -> None:
        check_reasons(f"the check {self.name!r}", self.note)

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One backend that was considered: its predicted and, where it was lowered, measured time."""

    backend: str
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    error: float | None = None
    note: Reason | None = None
