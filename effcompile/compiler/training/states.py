"""The ways to hold the optimizer's states, and the division of the batch, as they stand beside the schedule of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from effcompile.compiler.training.prepare import Prepared
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import UsageError
from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.footprint import GIVEN, GRADIENTS, Footprint
from effcompile.ir.plan import Decision, Setting
from effcompile.ir.step import DividedStep, Step
from effcompile.ops.optimizers import CHANGES, EIGHT_BIT, check
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


def end_footprint(prepared: Prepared) -> Footprint:
    """What a variant's backward leaves: what is there throughout, the loss and shown outputs, gradients."""
    step, held = prepared.step, prepared.cut.held
    lasting = (*step.results[: 1 + step.shown], *step.all_gradients)
    left = {s for node in lasting if node is not None for s in held.of[node]} - held.fixed
    return Footprint(end={GIVEN: prepared.cut.base_bytes, GRADIENTS: sum(held.nbytes[s] for s in left)})


def consumed_key(option: StatesOption | None) -> str:
    """Which variants of the step belong to a way: those that consume gradients know what each update allocates."""
    return option.label if option is not None and option.consumed else ""


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


def decisions(taken: StatesOption | None, given: StatesOption | None, step: Step) -> list[Decision]:
    """One for the states, and one for the gradients where they are consumed."""
    if taken is None or given is None:
        return []
    found = [
        Decision(
            site=SITE, kind=KIND, option=taken.label, baseline=given.label, by="states", cost=_cost(taken), baseline_cost=_cost(given),
            why=_why(taken, given), settings=taken.settings,
        )
    ]  # fmt: skip
    if taken.consumed:
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


def state_notes(states: StatesOption | None) -> list[str]:
    """What the user must know of a changed optimizer."""
    if states is None:
        return []
    notes = []
    name = states.form.name
    if name in CHANGES:
        kind, rate, decay = CHANGES[name]
        notes.append(
            f"another optimizer, as allowed by states.change: {kind}, with the given learning rate × {rate:.3g} and "
            f"weight decay × {decay:.3g}"
        )
    if states.consumed:
        notes.append("gradients are consumed in the backward: nothing may clip, accumulate or read them; call step() after every backward")
    return notes
