"""The search over the cases of a training step: its whole choices made, with what stands beside the schedule
of forward and backward.

What stands beside is alive at every instant, so a case with R bytes of it leaves budget − R to the schedule;
its update needs gradients, states and working memory at once. planner/search.py chooses among the cases; the
schedule of each is solved exactly, with a certificate of its own (solve.py), and the least of their bounds
bounds them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from effcompile.core.causes import NoRoom, Update
from effcompile.core.errors import InfeasibleError
from effcompile.ir.footprint import GIVEN, GRADIENTS, STATES, Footprint, excess
from effcompile.ir.plan import Declined
from effcompile.passes.training.base import Case
from effcompile.planner.search import Record
from effcompile.search.progress import QUIET, Progress
from effcompile.search.training.prepare import Preparation, Prepared
from effcompile.search.training.solve import Schedule, leanest, schedule


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A case with its schedule: what a plan says.

    Attributes:
        schedule: of one forward and backward.
        bound: no plan takes less in all: proven.
        record: the search that it comes from, None for a point of a frontier.
    """

    schedule: Schedule
    bound: float
    record: StepRecord | None = None

    @classmethod
    def of(cls, made: Schedule) -> Joint:
        """A case with a schedule of it."""
        return cls(schedule=made, bound=made.prepared.case.seconds(made.bound))

    @property
    def case(self) -> Case:
        return self.schedule.prepared.case

    @property
    def seconds(self) -> float:
        """Of forward, backward and update."""
        return self.case.seconds(self.schedule.seconds)

    @property
    def footprint(self) -> Footprint:
        """Of forward, backward and update."""
        return self.schedule.trace.footprint + self.case.beside

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes

    @property
    def declined(self) -> tuple[Declined, ...]:
        """The options of the whole step that were not taken."""
        return (
            ()
            if self.record is None
            else tuple(
                Declined(
                    site=chosen.choice.site,
                    kind=chosen.choice.kind,
                    option=option,
                    by=chosen.by,
                    reason=reason,
                )
                for chosen in reversed(self.case.taken)
                if chosen.choice.site
                for option, reason in self.record.declined(chosen.choice.kind)
            )
        )


#: What became of the cases of one request.
StepRecord = Record[Prepared, Joint]


def recorded(budget: int | None, progress: Progress) -> StepRecord:
    """An empty record of a search within a budget."""

    def solve(prepared: Prepared) -> Joint:
        with progress.step(f"solve ({prepared.case.label})"):
            return best(prepared, budget)

    return Record(solve=solve)


def fastest(found: Preparation, budget: int | None) -> Schedule:
    """The fastest schedule of a step without an optimizer.

    Raises:
        InfeasibleError: none is within the budget.
    """
    record = recorded(budget, QUIET)
    record.search(found.variants)
    return record.best.schedule


def best(prepared: Prepared, budget: int | None) -> Joint:
    """The best schedule of a case beside what stands there.

    Raises:
        InfeasibleError: forward and backward, or the update, are not within the budget.
    """
    case = prepared.case
    update = prepared.end + case.beside
    if case.states is not None and excess(update.at_update, budget):
        raise _update_too_large(prepared, update)
    try:
        return Joint.of(schedule(prepared, case.beside.room(budget)))
    except InfeasibleError as error:
        resident = case.beside.resident_bytes
        if not resident:
            raise
        needed = max(error.needed + resident, update.at_update)
        raise error.needing(needed, NoRoom(beside=case.around)) from error


def _update_too_large(prepared: Prepared, update: Footprint) -> InfeasibleError:
    needed = max(update.at_update, prepared.case.beside.resident_bytes + leanest(prepared))
    parts = replace(update, step={}).parts
    there = (
        ("parameters and gradients", parts.get(GIVEN, 0) + parts.get(GRADIENTS, 0)),
        ("states", parts.get(STATES, 0)), ("working memory", update.working),
    )  # fmt: skip
    beside = tuple(name for name, _ in prepared.case.around)
    return InfeasibleError(
        Update(beside=beside, needed=update.at_update, parts=there), nearest={"memory": float(needed)}
    )
