"""What a planned step, and the original beside it, took when they were timed on this machine is kept: a step
of seconds that takes it again is not run once more to see whether it settles. The report is of this run.

Known by the hash of what it follows from: the step, what was decided, the machine with its threads, the
versions of the packages and of our kernels.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from effcompile.core.files import cache_folder
from effcompile.core.kept_json import recalled, remember
from effcompile.ir.plan import Plan
from effcompile.machine import native
from effcompile.machine.hardware import this_hardware
from effcompile.proof.training.timed import LONG

#: Files that are kept, and bytes of one.
_MOST_FILES, _MOST_BYTES = 256, 1 << 10
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class KeptTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Seconds of a step, and of the model's own where it was timed, too."""

    planned: _Seconds | None = None
    original: _Seconds | None = None


def known_times(plan: Plan) -> KeptTimes:
    """What the steps of this plan took before; nothing where they were not timed."""
    return recalled(_path(plan), KeptTimes, _MOST_BYTES, "kept times of a step") or KeptTimes()


def keep_times(plan: Plan, planned: float, original: float | None) -> None:
    """Keep what they took now; those that are short are timed in no time."""
    if planned > LONG:
        remember(_path(plan), KeptTimes(planned=planned, original=original), _MOST_FILES)


def _path(plan: Plan) -> Path:
    return cache_folder() / "steps" / f"{hashlib.sha256(repr(what_runs(plan)).encode()).hexdigest()}.json"


def what_runs(plan: Plan) -> tuple[object, ...]:
    """The step, what was decided, and what runs it: the machine, the packages and our kernels."""
    decided = [(d.site, d.kind, d.option, sorted(d.settings.items())) for d in plan.decisions]
    machine = (this_hardware(), native.fingerprint(), sorted(plan.versions.items()))
    return machine, plan.fingerprint, plan.goal, plan.inputs, sorted(decided, key=repr)
