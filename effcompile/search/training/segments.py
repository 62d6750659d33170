"""Whether torch's allocator can carry a plan out in a GPU's memory: it reserves whole segments, of which not
all is given out.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import Because, Reason
from effcompile.machine.target import Target
from effcompile.schedules.reserved import Followed, NoSegmentError, follow
from effcompile.schedules.simulate import allocations
from effcompile.search.training.cases import Joint

__all__ = ["asked", "goes", "in_segments", "reserved_bytes", "that_goes", "told"]

#: Solves at the most, each for less.
_ROUNDS = 4
#: torch's options of its allocator, the second an older name.
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"

_RESERVED = (
    "on the GPU torch's allocator reserves {bytes} for the peak of {bytes}, in segments of its "
    "own sizes (simulated)"
)
_GIVEN_BACK = (
    "on the GPU torch's allocator would reserve {bytes} for the peak of {bytes}, in segments of its own "
    "sizes (simulated); in the {bytes} there it gives some back and takes others, which costs time"
)
_SCATTERED = (
    "on the GPU torch's allocator would reserve {bytes} for the peak of {bytes}, in segments of its own "
    "sizes (simulated), and does not find them in the {bytes} there: set {name}, or give less memory"
)


def in_segments(target: Target) -> bool:
    """Whether a plan for this target is carried out by the allocator that is simulated: torch's on a GPU, but
    for expandable segments.
    """
    return target.device == "cuda" and not any(_EXPANDABLE in os.environ.get(name, "") for name in _OPTIONS)


def asked(joint: Joint) -> Followed:
    """What a plan's steps ask for."""
    cut, beside = joint.schedule.prepared.cut, joint.case.beside.resident_bytes
    given = [*(cut.held.nbytes[s] for s in cut.held.fixed), *([cut.libraries // 2] * 2)]
    sizes = [int(node.meta["val"].numel()) for node in cut.step.parameters]
    states = [beside * size // max(1, sum(sizes)) for size in sizes]
    return Followed(
        lasting=[*given, max(0, cut.base_bytes - sum(given))],
        step=allocations(cut, joint.schedule.emitted),
        left=states,
    )


def reserved_bytes(joint: Joint) -> int:
    """Bytes that are taken from the device where there are enough."""
    return max(follow(asked(joint)).reserved, joint.peak_bytes)


def goes(joint: Joint, room: int) -> bool:
    """Whether a plan can be carried out on a device of so many bytes."""
    try:
        follow(asked(joint), room)
    except NoSegmentError:
        return False
    return joint.peak_bytes <= room


def that_goes(joint: Joint, target: Target, solve: Callable[[int], Joint]) -> Joint:
    """The plan if it can be carried out there, else the fastest of less memory that can; itself, where none
    of some does (`told` says so).

    solve: the best plan within a budget.
    """
    if not in_segments(target):
        return joint
    found = joint
    for _ in range(_ROUNDS):
        if goes(found, target.memory_bytes):
            return found
        lacking = max(1, reserved_bytes(found) - target.memory_bytes)
        try:
            found = solve(found.peak_bytes - lacking)
        except InfeasibleError:
            return joint
    return found if goes(found, target.memory_bytes) else joint


def told(joint: Joint, target: Target) -> list[Reason]:
    """What is reserved for a plan, and whether that is there."""
    if not in_segments(target):
        return []
    reserved, peak, room = reserved_bytes(joint), joint.peak_bytes, target.memory_bytes
    if reserved <= room:
        return [Because(_RESERVED, (reserved, peak))]
    if goes(joint, room):
        return [Because(_GIVEN_BACK, (reserved, peak, room))]
    return [Because(_SCATTERED, (reserved, peak, room, f"{_OPTIONS[0]}={_EXPANDABLE}"))]
