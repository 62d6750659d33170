"""What building the backends' plans and timing them in turn showed is kept: where the same plans come again,
those that were slower are not built once more. Of a tie the one that was ahead is as good as the other.

A race is known by the hash of all that its backends share: the graph, the goal, the machine with its threads,
the versions of the packages and of our kernels, and the errors that were measured, which are the weights'.
What a backend took is of the plan that it had: with another one it is open again. The best is built, verified
and timed again each time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec

from effcompile.backends.base import Backend
from effcompile.core.files import cache_folder
from effcompile.core.kept_json import recalled, remember
from effcompile.core.reasons import Because
from effcompile.ir.figures import Candidate
from effcompile.ir.plan import Plan
from effcompile.machine import native
from effcompile.machine.hardware import this_hardware
from effcompile.machine.load import busy
from effcompile.search.search import Search

#: Where others used the machine meanwhile, a backend is built again unless its result took this many times as
#: long as the best: as much as predictions are trusted to tell.
WHILE_BUSY = 1.08
#: Files that are kept, and bytes of one.
_MOST_FILES, _MOST_BYTES = 256, 64 << 10
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class KeptRace(msgspec.Struct, kw_only=True, frozen=True):
    """Backend → seconds of a call, all timed in turn on that day, and the hash of the plan that was proposed
    for it; whether others used the machine.
    """

    seconds: dict[str, _Seconds]
    plans: dict[str, str]
    day: str
    busy: bool

    def of(self, plans: Mapping[str, str]) -> dict[str, float]:
        """What those took that have the same plans now. Of a backend that has none the time stands: why it
        was not solved now is told beside what it took.
        """
        return {
            name: took
            for name, took in self.seconds.items()
            if plans.get(name, self.plans.get(name)) == self.plans.get(name)
        }

    def lost(self, of: Mapping[str, float]) -> dict[str, float]:
        """Those of them that were slower than the best, on a busy machine clearly."""
        most = (WHILE_BUSY if self.busy else 1.0) * min(of.values(), default=0.0)
        return {name: took for name, took in of.items() if took > most}


@dataclass(frozen=True, kw_only=True)
class Race:
    """The backends' plans of one model, and those of them that earlier races leave open.

    before: backend → seconds when these same plans were timed before.
    """

    path: Path
    plans: list[tuple[Backend, Plan]]
    candidates: list[Candidate]
    before: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, search: Search, plans: Sequence[tuple[Backend, Plan]], candidates: Sequence[Candidate]
    ) -> Race:
        """The race of these plans: those that lost it before are candidates that are not built."""
        path = cache_folder() / "races" / f"{_key(search, plans)}.json"
        known = search.machine.here and search.goal.minimize == "time"
        kept = recalled(path, KeptRace, _MOST_BYTES, "a kept race") if known else None
        of = kept.of(_hashes(plans)) if kept else {}
        lost = kept.lost(of) if kept else {}
        if kept is None or lost.keys() >= {backend.name for backend, _ in plans}:
            return cls(path=path, plans=list(plans), candidates=list(candidates))
        text = "not built: {seconds} beside {seconds} when these plans were timed in turn, {name}"
        return cls(
            path=path,
            before=of,
            plans=[(backend, plan) for backend, plan in plans if backend.name not in lost],
            candidates=[
                replace(c, note=Because(text, (lost[c.backend], min(of.values()), kept.day)))
                if c.backend in lost
                else c
                for c in candidates
            ],
        )

    def took(self, plan: Plan) -> float:
        """The least that a plan was measured to take, now or when it was timed before: others' work on the
        machine only adds to it.
        """
        return min(plan.seconds_measured, self.before.get(plan.backend, math.inf))

    def keep(self, plan: Plan, proposed: Sequence[tuple[Backend, Plan]]) -> None:
        """Keep what the candidates of a plan took, where several were timed in turn, or none was before, and
        the best as predicted: another minute's prices are taken anew.

        `proposed`: the plans that they were built from.
        """
        told = {c.backend: c.measured_seconds for c in plan.candidates if c.measured_seconds}
        if (len(told) < 2 and (self.before or not told)) or plan.misjudged is not None:
            return
        found = KeptRace(
            seconds=told, plans=_hashes(proposed), day=date.today().isoformat(), busy=bool(busy())
        )
        remember(self.path, found, _MOST_FILES)


def _hashes(plans: Sequence[tuple[Backend, Plan]]) -> dict[str, str]:
    """Backend → of what its plan chose."""
    return {backend.name: _hash(sorted(plan.options().items())) for backend, plan in plans}


def _key(search: Search, plans: Sequence[tuple[Backend, Plan]]) -> str:
    """The hash of what a race follows from, which is the same of all plans."""
    errors = sorted(search.sensitivity.errors.items())
    shared = [(plan.fingerprint, plan.inputs, sorted(plan.versions.items())) for _, plan in plans[:1]]
    machine = (this_hardware(), native.fingerprint())
    return _hash((machine, search.goal, shared, errors))


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
