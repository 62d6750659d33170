"""Whether a step fits on a machine that is not here.

The predicted peak with the model's error, against the machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable

from effcompile.core.causes import MachineTooSmall
from effcompile.core.errors import InfeasibleError
from effcompile.ir.step_figures import Fit, MemoryTimeline
from effcompile.machine.target import Target
from effcompile.search.training.cases import Joint
from effcompile.search.training.segments import goes, in_segments

#: How far the allocator's peak may be from the simulated one, as a share of it. On CPUs it was within 2 %
#: wherever measured (tests/compiler). On GPUs it was measured once (0.5 % above, a GPT-2 on an H100):
#: libraries take workspaces, and the context is there too. What fragmentation takes is simulated
#: (segments.py).
MODEL_ERROR = {"cpu": 0.02}
ELSEWHERE = 0.10

FITS, MARGINAL, DOES_NOT = "FITS", "MARGINAL", "DOES NOT FIT"


def model_error(target: Target) -> float:
    """The share that predictions for a target may be off."""
    return MODEL_ERROR.get(target.device, ELSEWHERE)


def room_elsewhere(target: Target) -> int:
    """Bytes of a machine that is not here, less what predictions for it may be off."""
    return int(target.memory_bytes / (1 + model_error(target)))


def limit(allowed: int | None, unplanned: int, target: Target) -> int | None:
    """The budget of a step that is to run on this machine: what the user allows, and never more than the
    machine has.

    unplanned: bytes with all kept; where that fits, nothing is limited that the user did not limit.
    """
    there = target.memory_bytes
    return allowed if unplanned <= there or (allowed is not None and allowed <= there) else there


def within_machine(target: Target, solve: Callable[[int], Joint]) -> Joint:
    """The best plan that fits with the error on top; else one that may fit.

    Raises:
        InfeasibleError: none does even without the error.
    """
    try:
        return solve(room_elsewhere(target))
    except InfeasibleError:
        pass
    try:
        return solve(target.memory_bytes)
    except InfeasibleError as error:
        needed = error.needed
        low, high = _interval(needed, target)
        machine = MachineTooSmall(
            target=target.name,
            memory_bytes=target.memory_bytes,
            needed=needed,
            between=(low, high),
            certain=low > target.memory_bytes,
        )
        raise error.needing(needed, machine) from error


def fit(joint: Joint, target: Target, timeline: MemoryTimeline, limit: int | None) -> Fit:
    """The verdict on a plan's peak. `limit`: the user's, else the machine's memory counts.

    On a GPU a plan fits only if its allocator finds the segments for it there, too.
    """
    low, high = _interval(joint.peak_bytes, target)
    allowed = target.memory_bytes if limit is None else min(limit, target.memory_bytes)
    verdict = FITS if high <= allowed else DOES_NOT if low > allowed else MARGINAL
    if verdict == FITS and in_segments(target) and not goes(joint, target.memory_bytes):
        verdict = MARGINAL
    instant = f"{timeline.peak_phase} {timeline.peak_site}".strip()
    return Fit(verdict=verdict, low_bytes=low, high_bytes=high, limit_bytes=allowed, instant=instant)


def _interval(peak_bytes: int, target: Target) -> tuple[int, int]:
    share = model_error(target)
    return int(peak_bytes * (1 - share)), int(peak_bytes * (1 + share))
