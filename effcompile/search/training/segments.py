"""Whether torch's allocator can carry a plan out in a GPU's memory: it reserves whole segments, of which not
all is given out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import Because, Reason
from effcompile.machine.target import Target
from effcompile.schedules.expandable import Expandable
from effcompile.schedules.reserved import Allocator, Followed, NoSegmentError, follow
from effcompile.schedules.simulate import allocations
from effcompile.search.training.cases import Joint

__all__ = ["asked", "foreseen", "goes", "in_segments", "reserved_bytes", "that_goes", "told"]

#: An allocator of a device or a process of so many bytes.
Made = Callable[[int | None], Allocator]
#: Solves at the most, each for less.
_ROUNDS = 4
#: torch's options of its allocator, the others older names (the last one ROCm's).
_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"
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
    "sizes (simulated), and does not find them in the {bytes} there: "
)
_UNKNOWN = (
    "torch's allocator is set to {name}, with which it is not simulated: what it reserves beyond the peak is "
    "not known"
)


def _of_segments(room: int | None) -> Allocator:
    return Allocator(limit=room)


def _of_device(room: int | None) -> Allocator:
    return Expandable(limit=room)


def _of_process(room: int | None) -> Allocator:
    return Expandable(limit=room, capped=True)


_SEGMENTS: tuple[Made, ...] = (_of_segments,)
#: A process's own limit is asked for other amounts than the device: a plan has to go with both.
_RANGES: tuple[Made, ...] = (_of_device, _of_process)


def _simulated() -> tuple[Made, ...]:
    """The allocators that a plan has to go with, by torch's options; none where an option is set whose
    effects are not simulated.
    """
    parts = [part.partition(":") for part in _set_to().split(",") if part.strip()]
    options = {name.strip(): value.strip().lower() for name, _, value in parts}
    ranges = options.pop(_EXPANDABLE, "false") in ("true", "1")
    if options and options != {"backend": "native"}:
        return ()
    return _RANGES if ranges else _SEGMENTS


def _set_to() -> str:
    return next((found for name in _OPTIONS if (found := os.environ.get(name, "").strip())), "")


def in_segments(target: Target) -> bool:
    """Whether a plan for this target is carried out by an allocator that is simulated: torch's on a GPU."""
    return target.device == "cuda" and bool(_simulated())


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
    return _reserved(joint, _simulated())


def foreseen(joint: Joint, target: Target) -> int | None:
    """The same where such an allocator carries the plan out; None elsewhere."""
    return reserved_bytes(joint) if in_segments(target) else None


def _reserved(joint: Joint, simulated: tuple[Made, ...]) -> int:
    followed = asked(joint)
    found = [follow(followed, partial(made, None)).reserved for made in simulated]
    return max([*found, joint.peak_bytes])


def goes(joint: Joint, room: int) -> bool:
    """Whether a plan can be carried out on a device of so many bytes."""
    return _goes(joint, room, _simulated())


def _goes(joint: Joint, room: int, simulated: tuple[Made, ...]) -> bool:
    followed = asked(joint)
    try:
        for made in simulated:
            follow(followed, partial(made, room))
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
        return [Because(_UNKNOWN, (_set_to(),))] if target.device == "cuda" else []
    reserved, peak, room = reserved_bytes(joint), joint.peak_bytes, target.memory_bytes
    if reserved <= room:
        return [Because(_RESERVED, (reserved, peak))]
    if goes(joint, room):
        return [Because(_GIVEN_BACK, (reserved, peak, room))]
    if _simulated() is _SEGMENTS and _goes(joint, room, _RANGES):
        text = _SCATTERED + "set {name}, with which it does (simulated), or give less memory"
        return [Because(text, (reserved, peak, room, f"{_OPTIONS[0]}={_EXPANDABLE}:True"))]
    return [Because(_SCATTERED + "give less memory", (reserved, peak, room))]
