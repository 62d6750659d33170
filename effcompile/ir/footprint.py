"""The bytes of a training step, and the one place where its peak is composed of them.

What stands side by side adds up: the schedule of forward and backward, the optimizer's states, the gradients
that micro-batches sum. Their sum is the footprint of the step, with

    peak = resident + max(step, end + working)

where `resident` is there at every instant, `step` at the highest instant of forward and backward, `end` is
what these two leave, and `working` is what the optimizer's step allocates on top of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The kinds of bytes, in the words of a plan's timeline.
GIVEN, GRADIENTS, KEPT = "parameters, buffers, inputs", "gradients", "kept activations"
WORKING, STATES = "working memory", "optimizer states"
#: What the vendor's matrix products keep on a GPU for themselves.
LIBRARIES = "workspaces of libraries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on the device by kind, of a whole step or of what stands beside others in it.

    Attributes:
        step: at the highest instant of forward and backward.
        end: what is left when they are over.
        resident: beside these, at every instant.
        working: beside `end`, at the highest instant of the optimizer's step.
        host: bytes on the host.
    """

    step: Mapping[str, int] = field(default_factory=dict)
    end: Mapping[str, int] = field(default_factory=dict)
    resident: Mapping[str, int] = field(default_factory=dict)
    working: int = 0
    host: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            step=_added(self.step, other.step),
            end=_added(self.end, other.end),
            resident=_added(self.resident, other.resident),
            working=self.working + other.working,
            host=self.host + other.host,
        )

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    @property
    def at_step(self) -> int:
        """Bytes at the highest instant of forward and backward."""
        return self.resident_bytes + sum(self.step.values())

    @property
    def at_update(self) -> int:
        """Bytes at the highest instant of the optimizer's step."""
        return self.resident_bytes + sum(self.end.values()) + self.working

    @property
    def peak_bytes(self) -> int:
        return max(self.at_step, self.at_update)

    @property
    def updating(self) -> bool:
        """Whether the highest instant is in the optimizer's step."""
        return self.at_update > self.at_step

    @property
    def parts(self) -> dict[str, int]:
        """What is alive at the highest instant, by kind."""
        if self.updating:
            return {**_added(self.end, self.resident), WORKING: self.working}
        return _added(self.step, self.resident)

    def room(self, budget: int | None) -> int | None:
        """What a budget leaves to forward and backward beside the resident bytes; None for no limit."""
        return None if budget is None else max(budget - self.resident_bytes, 1)


def excess(peak: int | None, budget: int | None) -> int:
    """By how many bytes a peak is above a budget: 0 within it, or where one of the two is not known."""
    return 0 if peak is None or budget is None else max(peak - budget, 0)


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    total = Counter(first)
    total.update(second)
    return dict(total)
