"""What a plan of a training step holds beside its decisions: memory over the step, whether it fits elsewhere,
what each lever reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from effcompile.core.errors import UsageError

#: A memory timeline has no more points than this: enough for a wide terminal, little in a plan.json.
MOST_POINTS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes live on the device over one training step, as predicted by simulating what was emitted, and its
    highest instant.

    Attributes:
        points: bytes live, in the order of the step; at most MOST_POINTS, each the maximum of its bucket.
        forward_points: how many of them belong to the forward; the others are the backward.
        parameter_bytes: what is live at every instant: parameters, buffers, inputs.
        peak_phase: "forward" or "backward". peak_site: the block. peak_node: the operator.
        parts: what is alive at the peak → bytes: "parameters, buffers, inputs", "gradients", "kept
            activations", "working memory".

    Raises:
        UsageError: no points, too many, or a division that is not among them.
    """

    points: tuple[int, ...]
    forward_points: int
    parameter_bytes: int
    peak_phase: str
    peak_site: str
    peak_node: str
    parts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.points) <= MOST_POINTS:
            raise UsageError(
                f"a memory timeline of {len(self.points)} points; 1 to {MOST_POINTS} are allowed"
            )
        if not 0 <= self.forward_points <= len(self.points):
            raise UsageError(
                f"forward_points = {self.forward_points} must be 0 to {len(self.points)}, the number of "
                "points"
            )

    @property
    def peak_bytes(self) -> int:
        return max(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a training step fits on a machine that is not here.

    Attributes:
        verdict: "FITS" (the whole interval does), "MARGINAL", "DOES NOT FIT" (none of it does).
        low_bytes, high_bytes: the predicted peak less and plus the model's error.
        limit_bytes: the machine's memory, or the user's limit where that is less.
        instant: the one that binds: "backward model.layers.3".
    """

    verdict: str
    low_bytes: int
    high_bytes: int
    limit_bytes: int
    instant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """What some of a training step's memory levers reach by themselves, within the plan's budget. Predicted.

    Attributes:
        levers: their names; none: everything is kept.
        seconds: of the fastest step with them that fits; None where none does.
        peak_bytes: its peak; where none fits, the least that these levers reach.
        every: of whole blocks that are remade, how many there are to each; 0 where the planner chose freely.
    """

    levers: tuple[str, ...]
    seconds: float | None
    peak_bytes: int
    every: int = 0
