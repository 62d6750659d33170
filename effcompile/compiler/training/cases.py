"""The cases of a training step: its whole choices made, with what stands beside the schedule of forward and backward.

States and summed gradients are alive at every instant, so a case with R bytes of them leaves budget − R to the schedule; its
update needs gradients, states and working memory at once. planner/search.py chooses among the cases; the schedule of each is
solved exactly, with a certificate of its own (solve.py), and the least of their bounds bounds them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training.prepare import Preparation, Prepared
from effcompile.compiler.training.solve import Schedule, leanest, schedule
from effcompile.compiler.training.states import Parts, beside, consumed_key, end_footprint, full_label
from effcompile.core.errors import InfeasibleError
from effcompile.core.units import format_bytes
from effcompile.ir.footprint import Footprint, excess
from effcompile.ir.plan import Declined
from effcompile.ir.reasons import Reason, Unsupported
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.passes.training.microbatch import KIND as BATCH
from effcompile.passes.training.microbatch import SITE as BATCH_SITE
from effcompile.passes.training.microbatch import Microbatch, label
from effcompile.passes.training.states import KIND as STATES
from effcompile.passes.training.states import SITE as STATES_SITE
from effcompile.passes.training.states import States, StatesOption
from effcompile.planner.search import Record


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One case.

    Attributes:
        prepared: the variant of the step; of one micro-batch where there are `parts`.
        checkpoint: plans its blocks.
        states: how the optimizer's states are held, None without an optimizer; given: as it was given.
        batch: examples in all.
    """

    prepared: Prepared
    checkpoint: Checkpoint
    states: StatesOption | None = None
    given: StatesOption | None = None
    parts: Parts | None = None
    batch: int = 1

    @property
    def options(self) -> Mapping[str, str]:
        """What is decided for the whole step → the option, in the plan's words."""
        found = {chosen.choice.kind: chosen.option.name for chosen in reversed(self.prepared.case.taken)}
        if self.states is not None:
            found[STATES] = full_label(self.states)
        return {**found, BATCH: label(self.parts.step.count if self.parts else 1, self.batch)}

    @property
    def levers(self) -> frozenset[str]:
        """What is decided otherwise than in the step as it was given, where there was a choice."""
        given = {
            chosen.choice.kind: chosen.choice.baseline if len(chosen.choice.options) > 1 else chosen.option.name
            for chosen in self.prepared.case.taken
        }
        given[BATCH] = label(1, self.batch)
        if self.given is not None:
            given[STATES] = full_label(self.given)
        return frozenset(kind for kind, option in self.options.items() if option != given[kind])

    @property
    def beside(self) -> Footprint:
        """What stands beside the schedule."""
        return beside(self.states, self.parts)

    @property
    def least_seconds(self) -> float:
        """Of the whole step with nothing recomputed."""
        return self.seconds(self.prepared.seconds)

    def seconds(self, of_schedule: float) -> float:
        """Of the whole step, given those of forward and backward of one (micro-)batch."""
        whole = self.parts.seconds(of_schedule) if self.parts else of_schedule
        return whole + (self.states.seconds if self.states else 0.0)

    def solve(self, budget: int | None, gap: float = 0.01) -> Joint:
        """The best schedule beside what stands there.

        Raises:
            InfeasibleError: forward and backward, or the update, are not within the budget.
        """
        around = self.beside
        update = (end_footprint(self.prepared) + around).at_update
        if self.states is not None and excess(update, budget):
            raise self._update_too_large(self.states, update)
        try:
            return self.with_schedule(schedule(self.prepared, self.checkpoint, around.room(budget), gap=gap))
        except InfeasibleError as error:
            if not around.resident_bytes:
                raise
            raise self._no_room(error, max(error.needed + around.resident_bytes, update)) from error

    def with_schedule(self, made: Schedule) -> Joint:
        """The case with a schedule."""
        return Joint(schedule=made, case=self, bound=self.seconds(made.bound))

    def _update_too_large(self, states: StatesOption, update: int) -> InfeasibleError:
        end = update - states.resident_bytes - states.working_bytes
        needed = max(update, self.beside.resident_bytes + leanest(self.prepared, self.checkpoint))
        return InfeasibleError(
            f"With optimizer states {states.label} the optimizer's step needs {format_bytes(update)}: parameters and gradients "
            f"{format_bytes(end)}, states {format_bytes(states.resident_bytes)}, working memory {format_bytes(states.working_bytes)}.",
            smallest=f"The smallest feasible budget with these states is {format_bytes(needed)} ({needed} bytes).",
            nearest={"memory": float(needed)},
        )

    def _no_room(self, error: InfeasibleError, needed: int) -> InfeasibleError:
        """The error of a schedule, with what there is beside it."""
        states, parts = self.states, self.parts
        there = [f"optimizer states {states.label} ({format_bytes(states.resident_bytes)} on the device)"] if states else []
        there += [f"{parts.step.count} micro-batches, whose gradients are summed ({format_bytes(parts.gradient_bytes)})"] if parts else []
        these = "these states" if parts is None else "them"
        return error.around(
            f"With {' and '.join(there)} there is no room left for forward and backward.", needed,
            f"The smallest feasible budget with {these} is {format_bytes(needed)} ({needed} bytes).",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A case with its schedule: what a plan says.

    Attributes:
        schedule: of one micro-batch where the case has several.
        bound: no plan takes less in all: proven.
        record: the search that it comes from, None for a point of a frontier.
        ways: how many ways to hold the states there were. refused: those that cannot be.
    """

    schedule: Schedule
    case: StepCase
    bound: float
    record: StepRecord | None = None
    ways: int = 0
    refused: tuple[Declined, ...] = ()

    @property
    def states(self) -> StatesOption | None:
        return self.case.states

    @property
    def parts(self) -> Parts | None:
        return self.case.parts

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
        places = {STATES: (STATES_SITE, States.name), BATCH: (BATCH_SITE, Microbatch.name)}
        places |= {chosen.choice.kind: (chosen.choice.site, chosen.by) for chosen in self.schedule.prepared.case.taken}
        found = [] if self.record is None else [
            Declined(site=site, kind=kind, option=option, by=by, reason=str(reason))
            for kind, (site, by) in places.items()
            for option, reason in self.record.declined(kind) if site
        ]  # fmt: skip
        return (*found, *self.refused)


#: What became of the cases of one request.
StepRecord = Record[StepCase, Joint]


def recorded(budget: int | None, progress: Progress) -> StepRecord:
    """An empty record of a search within a budget."""

    def solve(case: StepCase) -> Joint:
        with progress.step(f"solve ({case.prepared.case.label})"):
            return case.solve(budget)

    return Record(solve=solve)


def cases(
    found: Preparation, ways: Sequence[StatesOption], checkpoint: Checkpoint, parts: Parts | None = None, batch: int = 1
) -> list[StepCase]:
    """Every variant with every way to hold the states that it was made for. No ways: no optimizer was given.

    parts: what `found` is one micro-batch of; None: it is the whole step.
    """
    given = ways[0] if ways else None
    return [
        StepCase(prepared=prepared, checkpoint=checkpoint, states=way, given=given, parts=parts, batch=batch)
        for way in (ways or (None,))
        for prepared in found.variants
        if prepared.consumed == consumed_key(way) and not (parts is not None and way is not None and way.consumed)
    ]


def fastest(found: Preparation, checkpoint: Checkpoint, budget: int | None) -> Schedule:
    """The fastest schedule of a step without an optimizer.

    Raises:
        InfeasibleError: none is within the budget.
    """
    record = recorded(budget, QUIET)
    record.search(cases(found, (), checkpoint))
    return record.best.schedule


def impossible(
    found: Preparation, ways: Sequence[StatesOption], parts: Parts | None, batch: int
) -> Iterator[tuple[Mapping[str, str], Reason]]:
    """The ways that no variant can have, with the reasons."""
    keys = {prepared.consumed for prepared in found.variants}
    for way in ways:
        if way.consumed and parts is not None:
            said = "gradients that are summed over micro-batches are complete only after the last one"
            yield {STATES: full_label(way), BATCH: label(parts.step.count, batch)}, Unsupported(text=said)
        elif consumed_key(way) not in keys:
            said = "the loss is scaled: an overflow must be seen before any parameter is updated"
            yield {STATES: full_label(way)}, Unsupported(text=said)
