"""Activations and optimizer states in one solve: for every way to hold the states, the best schedule in the bytes that they leave.

States are alive at every instant of the step, so a way that keeps R bytes of them leaves budget − R to forward and backward;
its own update needs gradients, states and working memory at once. The fastest of all is taken. Ways whose update alone takes
as long as the best found need no solve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training.prepare import Preparation, Prepared
from effcompile.compiler.training.solve import Schedule, best_schedule, leanest
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.footprint import GIVEN, GRADIENTS, Footprint, excess
from effcompile.ir.plan import Decision, Declined, Setting
from effcompile.ir.step import DividedStep
from effcompile.ops.optimizers import CHANGES, EIGHT_BIT, check
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.passes.training.states import KIND, SITE, States, StatesOption


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A batch in micro-batches.

    Attributes:
        step: divided.
        gradient_bytes: of the summed gradients, there at every instant. A part's inputs are views of the batch, which the step counts.
        add_seconds: of adding all gradients up.
        scale: what a micro-batch's time is multiplied by, so that all of them unplanned are predicted no faster than the whole batch:
            small operators timed alone find their operands in the cache, as in a step they do not.
        whole_seconds, whole_bytes: of the unplanned step over the batch.
    """

    step: DividedStep
    gradient_bytes: int
    add_seconds: float
    scale: float
    whole_seconds: float
    whole_bytes: int

    def seconds(self, of_one: float) -> float:
        """Of the whole step, from that of a micro-batch."""
        return self.step.count * self.scale * of_one + self.add_seconds

    @property
    def footprint(self) -> Footprint:
        """What stands beside a micro-batch: summed gradients, the sum of the losses."""
        loss = self.step.part.loss.meta["val"]
        return Footprint(resident={GIVEN: int(loss.numel() * loss.element_size()), GRADIENTS: self.gradient_bytes})


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A schedule with the way to hold the states that it was made for.

    Attributes:
        schedule: the best, of one micro-batch where there are `parts`; others: those of all loss heads that have one, with these states.
        states: None where no optimizer was given. given: the way of the optimizer as it is. ways: how many there were.
        bound: no plan takes less in all: proven.
        declined: ways not taken, with the reason.
    """

    schedule: Schedule
    others: tuple[Schedule, ...]
    bound: float
    states: StatesOption | None = None
    given: StatesOption | None = None
    ways: int = 0
    declined: tuple[Declined, ...] = ()
    parts: Parts | None = None

    @property
    def seconds(self) -> float:
        """Of forward, backward and update."""
        return _times(self.schedule.seconds, self.parts) + (self.states.seconds if self.states else 0.0)

    @property
    def footprint(self) -> Footprint:
        """Of forward, backward and update."""
        return self.schedule.trace.footprint + beside(self.states, self.parts)

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes


def as_optimizer(given: Any, model: nn.Module) -> Optimizer | None:
    """The optimizer that was given, or that the given function makes of the model's trainable parameters.

    Raises:
        UsageError: no optimizer, one that cannot be planned, or the function raises.
    """
    if given is None:
        return None
    if not isinstance(given, Optimizer) and callable(given):
        try:
            given = given([p for p in model.parameters() if p.requires_grad])
        except Exception as error:
            raise UsageError(f"optimizer(parameters) raises: {type(error).__name__}: {error}") from error
    return check(given)


def beside(states: StatesOption | None, parts: Parts | None) -> Footprint:
    """What stands beside forward and backward of a (micro-)batch."""
    return (states.footprint if states else Footprint()) + (parts.footprint if parts else Footprint())


def best_joint(
    found: Preparation, options: Sequence[StatesOption], refused: Sequence[Declined], checkpoint: Checkpoint, budget: int | None,
    *, progress: Progress = QUIET, solve: Callable[..., tuple[Schedule, list[Schedule]]] = best_schedule, parts: Parts | None = None,
) -> Joint:  # fmt: skip
    """The fastest schedule with the fastest states that are within the budget together. No options: no optimizer was given.

    parts: what `found` is one micro-batch of; None: it is the whole step.

    Raises:
        InfeasibleError: nothing fits; the way that comes nearest explains why.
    """
    if not options:
        return _with(None, found.variants, checkpoint, budget, progress, solve, parts)
    tried: dict[int, Joint] = {}
    reasons: dict[int, str] = {}
    errors: list[InfeasibleError] = []
    for number, option in sorted(enumerate(options), key=lambda item: item[1].seconds):
        variants = [p for p in found.variants if p.variant.consumed == consumed_key(option)]
        if not variants:
            reasons[number] = "the loss is scaled: an overflow must be seen before any parameter is updated"
            continue
        least = option.seconds + _times(min(p.seconds for p in variants), parts)
        fastest = min((joint.seconds for joint in tried.values()), default=float("inf"))
        if least >= fastest:
            reasons[number] = f"takes at least {format_seconds(least - fastest)} more a step"
            continue
        try:
            tried[number] = _with(option, variants, checkpoint, budget, progress, solve, parts)
        except InfeasibleError as error:
            errors.append(error)
            reasons[number] = f"at least {format_bytes(int(error.nearest.get('memory', 0)))} with it"
    if not tried:
        raise _with_refused(min(errors, key=lambda e: e.nearest.get("memory", float("inf"))), refused)
    taken = min(tried, key=lambda number: tried[number].seconds)
    best_found = tried[taken]
    for number, joint in tried.items():
        if number != taken:
            reasons[number] = f"the fastest plan with it takes {format_seconds(joint.seconds - best_found.seconds)} more a step"
    return Joint(
        schedule=best_found.schedule, others=best_found.others, states=options[taken], given=options[0], ways=len(options), parts=parts,
        bound=min(joint.bound for joint in tried.values()),
        declined=(*(declined_way(options[n], reason) for n, reason in sorted(reasons.items())), *refused),
    )  # fmt: skip


def _with_refused(error: InfeasibleError, refused: Sequence[Declined]) -> InfeasibleError:
    """The error, which also tells of ways that were not tried."""
    left = "; ".join(f"{r.option}: {r.reason}" for r in refused)
    return InfeasibleError(f"{error} Not tried: {left}." if left else str(error), binding=error.binding, nearest=error.nearest)


def _with(
    option: StatesOption | None, variants: Sequence[Prepared], checkpoint: Checkpoint, budget: int | None, progress: Progress,
    solve: Callable[..., tuple[Schedule, list[Schedule]]], parts: Parts | None,
) -> Joint:  # fmt: skip
    """The best schedule with one way to hold the states.

    Raises:
        InfeasibleError: forward and backward, or the update, do not fit beside the states.
    """
    around = beside(option, parts)
    least = min((end_footprint(p) for p in variants), key=lambda end: end.peak_bytes) + around
    needed = least.at_update
    if option is not None and excess(needed, budget):
        end = needed - option.resident_bytes - option.working_bytes
        raise InfeasibleError(
            f"With optimizer states {option.label} the optimizer's step needs {format_bytes(needed)}: parameters and gradients "
            f"{format_bytes(end)}, states {format_bytes(option.resident_bytes)}, working memory {format_bytes(option.working_bytes)}. "
            f"The smallest budget that it fits in is {format_bytes(needed)} ({needed} bytes).",
            nearest={"memory": float(max(needed, around.resident_bytes + min(leanest(p, checkpoint) for p in variants)))},
        )
    try:
        best, others = solve(variants, checkpoint, around.room(budget), progress=progress)
    except InfeasibleError as error:
        if not around.resident_bytes:
            raise
        raise _no_room(error, option, parts, max(int(error.nearest.get("memory", 0)) + around.resident_bytes, needed)) from error
    bound = _times(_bound(others), parts) + (option.seconds if option else 0.0)
    return Joint(schedule=best, others=tuple(others), states=option, bound=bound, parts=parts)


def _no_room(error: InfeasibleError, option: StatesOption | None, parts: Parts | None, nearest: int) -> InfeasibleError:
    """The error of a schedule, with what there is beside it."""
    there = [f"optimizer states {option.label} ({format_bytes(option.resident_bytes)} on the device)"] if option else []
    there += [f"{parts.step.count} micro-batches, whose gradients are summed ({format_bytes(parts.gradient_bytes)})"] if parts else []
    these = "these states" if parts is None else "them"
    return InfeasibleError(
        f"With {' and '.join(there)} there is no room left for forward and backward. "
        f"{str(error).partition(' The smallest feasible budget')[0]} The smallest feasible budget with {these} is "
        f"{format_bytes(nearest)} ({nearest} bytes).",
        binding=error.binding, nearest={"memory": float(nearest)},
    )  # fmt: skip


def _times(seconds: float, parts: Parts | None) -> float:
    """Of a whole step, from that of a micro-batch."""
    return seconds if parts is None else parts.seconds(seconds)


def end_footprint(prepared: Prepared) -> Footprint:
    """What a variant's backward leaves: what is there throughout, the loss and shown outputs, gradients."""
    step, held = prepared.step, prepared.cut.held
    lasting = (*step.results[: 1 + step.shown], *step.all_gradients)
    left = {s for node in lasting if node is not None for s in held.of[node]} - held.fixed
    return Footprint(end={GIVEN: prepared.cut.base_bytes, GRADIENTS: sum(held.nbytes[s] for s in left)})


def _bound(solved: Sequence[Schedule]) -> float:
    return min(s.prepared.seconds + s.solution.bound for s in solved)


def consumed_key(option: StatesOption) -> str:
    """Which variants of the step belong to a way: those that consume gradients know what each update allocates."""
    return option.label if option.consumed else ""


def declined_way(option: StatesOption, reason: str) -> Declined:
    """A way that was not taken."""
    return Declined(site=SITE, kind=KIND, option=full_label(option), by="states", reason=reason)


def full_label(option: StatesOption) -> str:
    """States and gradients: "8-bit, on the host; gradients consumed in the backward"."""
    return option.label + ("; gradients consumed in the backward" if option.consumed else "")


def allowing(states: States, saved: Mapping[str, Setting]) -> States:
    """The pass with what a saved plan has already allowed."""
    form = saved.get("form")
    return replace(
        states, offload=states.offload or saved.get("on_host") is True, eight_bit=states.eight_bit or form == EIGHT_BIT,
        in_backward=states.in_backward or saved.get("consumed") is True, change=(str(form),) if form in CHANGES else states.change,
    )  # fmt: skip


# ------------------------------------------------------------------ what the plan says


def decisions(joint: Joint) -> list[Decision]:
    """One for the states, and one for the gradients where they are consumed."""
    taken, given = joint.states, joint.given
    if taken is None or given is None:
        return []
    found = [
        Decision(
            site=SITE, kind=KIND, option=taken.label, baseline=given.label, by="states", cost=_cost(taken), baseline_cost=_cost(given),
            why=_why(taken, given), settings=taken.settings,
        )
    ]  # fmt: skip
    if taken.consumed:
        step = joint.schedule.prepared.step
        size = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n, name in step.parameters.items() if name in step.consumed)
        found.append(
            Decision(
                site=f"{SITE}.gradients", kind="gradient", option="consumed in the backward", baseline="kept until the step", by="states",
                cost=Cost(), baseline_cost=Cost(bytes_transient=size), why="each is freed as soon as its parameter is updated",
            )
        )  # fmt: skip
    return found


def _cost(option: StatesOption) -> Cost:
    provenance = Provenance.MEASURED if option.measured else Provenance.MODELLED
    return Cost(
        seconds=option.seconds, bytes_kept=option.resident_bytes, bytes_transient=option.working_bytes, bytes_link=option.link_bytes,
        provenance=provenance,
    )  # fmt: skip


def _why(taken: StatesOption, given: StatesOption) -> str:
    if taken.label == given.label:
        return f"{format_bytes(taken.resident_bytes)} are there at every instant, and fit"
    moved = f", {format_bytes(taken.link_bytes)} over the link in every step" if taken.link_bytes else ""
    host = f"; {format_bytes(taken.host_bytes)} on the host{moved}" if taken.on_host else ""
    return f"frees {format_bytes(given.resident_bytes - taken.resident_bytes)} at every instant for {_more(taken, given)}{host}"


def _more(taken: StatesOption, given: StatesOption) -> str:
    extra = taken.seconds - given.seconds
    return format_seconds(extra) if extra > 0 else "no more time"


def state_notes(joint: Joint) -> list[str]:
    """What the user must know of a changed optimizer."""
    if joint.states is None:
        return []
    notes = []
    name = joint.states.form.name
    if name in CHANGES:
        kind, rate, decay = CHANGES[name]
        notes.append(
            f"another optimizer, as allowed by states.change: {kind}, with the given learning rate × {rate:.3g} and "
            f"weight decay × {decay:.3g}"
        )
    if joint.states.consumed:
        notes.append("gradients are consumed in the backward: nothing may clip, accumulate or read them; call step() after every backward")
    return notes


def with_states(
    made: Schedule, consumed: str, options: Sequence[StatesOption], refused: Sequence[Declined], parts: Parts | None = None
) -> list[Joint]:
    """A schedule with every way to hold the states that it was made for: points of a frontier."""
    bound = _times(_bound([made]), parts)
    if not options:
        return [Joint(schedule=made, others=(), bound=bound, parts=parts)]
    return [
        Joint(
            schedule=made, others=(), bound=bound + option.seconds, states=option, given=options[0], ways=len(options),
            declined=tuple(refused), parts=parts,
        )
        for option in options if consumed_key(option) == consumed
    ]  # fmt: skip
