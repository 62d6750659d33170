"""Which backends' plans are worth building: those that are predicted to take little longer than the best, and
what running it shows to be undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from effcompile.backends.base import Backend
from effcompile.core.findings import NotBuilt
from effcompile.core.timing import SETTLED
from effcompile.ir.figures import Candidate
from effcompile.ir.plan import Plan

#: A backend predicted slower than the best by more than this factor is not built: predictions are not that
#: wrong. On a GPU, where what an operator takes alone says little of a graph of them, each is.
SHORTLIST = 1.08


class _Built(Protocol):
    @property
    def plan(self) -> Plan: ...


def worth_building(backend: Backend, built: Sequence[_Built], share: float, beside: float = 0.0) -> float:
    """The largest predicted objective that is, beside what other backends made of theirs: so many times the
    best of them, or as long as the best was measured to take.
    """
    return backend.slack * max(share * _best(built), beside)


def not_built(plan: Plan, built: Sequence[_Built]) -> NotBuilt:
    """Why it is not."""
    return NotBuilt(times=plan.certificate.objective / _best(built))


def _best(built: Sequence[_Built]) -> float:
    return min((each.plan.certificate.objective for each in built), default=math.inf)


def undecided(
    plans: Sequence[tuple[Backend, Plan]], told: Sequence[Candidate], seconds: float
) -> list[tuple[Backend, Plan]]:
    """Backends that were not built though by their prediction they take less than was measured, and by more
    than what such a comparison settles: what promises less could not be told from the best once it is built.
    """
    seconds *= 1 - SETTLED
    left = {c.backend: c.predicted_seconds or math.inf for c in told if isinstance(c.note, NotBuilt)}
    return [
        (backend, plan)
        for backend, plan in plans
        if plan.goal.minimize == "time" and left.get(backend.name, math.inf) <= backend.slack * seconds
    ]


def may_hold_less(
    plans: Sequence[tuple[Backend, Plan]], told: Sequence[Candidate], best: Plan
) -> list[tuple[Backend, Plan]]:
    """As `undecided` where the least memory is asked for: those that are predicted to hold less at their peak
    than the best was measured to, whatever they weigh.
    """
    left = {c.backend for c in told if isinstance(c.note, NotBuilt)}
    held = (best.measured and best.measured.peak_bytes) or 0
    return [
        (backend, plan)
        for backend, plan in plans
        if backend.name in left and (plan.predicted.peak_bytes or 0) < held
    ]
