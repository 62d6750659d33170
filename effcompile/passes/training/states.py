"""Optimizer states: as they are, in 8 bits, of another optimizer, on the host; gradients consumed in the
backward.

Sources: 8-bit states: Dettmers et al. 2022 (arXiv 2110.02861), torchao. Host: ZeRO-Offload, Ren et al. 2021
(arXiv 2101.06840). Lion: Chen et al. 2023 (arXiv 2302.06675). Each combination is one option of the whole
step; the solver takes it together with the activations' plan, so a byte that is freed in one place may be
spent in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import EffcompileError, FormatError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Frees, Kept, NotAllowed, Reason, Unsupported
from effcompile.core.stages import first_line
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.step import Step
from effcompile.ops.optimizers import (
    CHANGES,
    CPU_PIECE,
    EIGHT_BIT,
    GIVEN,
    LION8,
    StatesForm,
    declined,
    one_by_one,
)
from effcompile.passes.training.base import (
    Case,
    RequestError,
    StepChoice,
    StepContext,
    StepOption,
    StepOutcome,
)
from effcompile.passes.training.consume import with_consumed_gradients
from effcompile.passes.training.optimizer_ways import GivenOptimizer, StatesOption
from effcompile.passes.training.step_edit import Refusal

SITE = "optimizer"
KIND = "optimizer states"
CONSUMED = "gradients consumed in the backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How optimizer states may be held, where an optimizer is given.

    `offload`: on the host, with the update there. `eight_bit`: in 8 bits; also proposed where the goal allows
    an error. `in_backward`: gradients may be consumed in the backward; only on demand, because a loop that
    clips, accumulates or reads gradients between `backward()` and `step()` would silently do something else.
    `change`: optimizers that may replace the given one: lion, lamb, lars, and lion8, which is Lion with its
    state in 8 bits.
    """

    offload: bool = True
    eight_bit: bool = False
    in_backward: bool = False
    change: tuple[str, ...] = ()

    name: ClassVar[str] = "states"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.change:
            if name not in CHANGES:
                raise UsageError(
                    f"states.change = {name!r} is not known. Choose among: {', '.join(CHANGES)}."
                )

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """Every allowed way, the given one first, and what cannot be, with reasons; nothing without an
        optimizer.

        Raises:
            RequestError: the optimizer's own step raises.
        """
        if case.optimizer is None:
            return
        try:
            ways, refused = (
                self._ways(case.optimizer, context.goal)
                if case.step.spread is None
                else _on_ranks(case.optimizer)
            )
        except EffcompileError:
            raise
        except Exception as error:
            # an optimizer of any kind, run on parameters like the model's with dense gradients
            raise RequestError(
                f"{type(case.optimizer.optimizer).__name__} cannot be planned: its step raises on parameters "
                f"like the model's with dense gradients: {first_line(error)}. Leave the optimizer out, and "
                "count its states in `memory` yourself."
            ) from error
        for option, reason in refused.items():
            yield Declined(site=SITE, kind=KIND, option=option, by=self.name, reason=reason)
        options = [
            StepOption(name=way.full_label, settings=way.settings, told=partial(_told, way, ways[0]))
            for way in ways
        ]
        yield StepChoice(
            site=SITE, kind=KIND, baseline=ways[0].full_label, options=tuple(options), tells=True
        )

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with the states beside it; where they are consumed, it returns no gradients.

        Raises:
            Refusal: this step cannot consume its gradients. FormatError: the plan holds states, and no
                optimizer is given.
        """
        if choice.kind != KIND:
            return case  # the gradients: the states' own option has consumed them
        if case.optimizer is None:
            raise FormatError("The plan holds optimizer states: give the optimizer, too, when it is applied.")
        way = _way_of(case.optimizer, option)
        if way.consumed and case.division is not None:
            raise Refusal("gradients that are summed over micro-batches are complete only after the last one")
        if way.consumed and case.scaled:
            raise Refusal("the loss is scaled: an overflow must be seen before any parameter is updated")
        return replace(
            case,
            step=with_consumed_gradients(case.step, way.pieces.keys(), way.pieces)
            if way.consumed
            else case.step,
            states=way,
            beside=case.beside + way.footprint,
            seconds_beside=case.seconds_beside + way.seconds,
            around=((f"optimizer states {way.label}", way.resident_bytes), *case.around),
            notes=(*_notes(way), *case.notes),
        )

    def _ways(self, given: GivenOptimizer, goal: Goal) -> tuple[list[StatesOption], dict[str, Reason]]:
        """The ways, and option → why it cannot be."""
        forms, refused = self._forms(given, goal)
        found = [given.way(form) for form in forms]
        reason: Reason | None = (
            given.no_host() if self.offload else Unsupported("switched off by --pass states.offload=false")
        )
        if reason is None:
            found += [given.way(form, on_host=True) for form in forms]
        else:
            refused["on the host"] = reason
        reason = one_by_one(given.optimizer)
        if not self.in_backward:
            change = "a loop that clips or accumulates gradients would change"
            reason = NotAllowed(because=change, allow=("--pass states.in_backward=true",))
        if reason is not None:
            refused[CONSUMED] = reason
        consumed = (
            [given.way(o.form, on_host=o.on_host, consumed=True) for o in found] if reason is None else []
        )
        return [*found, *consumed], refused

    def _forms(self, given: GivenOptimizer, goal: Goal) -> tuple[list[StatesForm], dict[str, Reason]]:
        forms, refused = [given.given.form], dict[str, Reason]()
        allowed = self.eight_bit or not goal.exact
        eight = (
            None
            if allowed
            else NotAllowed(because="changes numbers", allow=("max_error", "--pass states.eight_bit=true"))
        )
        for name, reason in {EIGHT_BIT: eight, **dict.fromkeys(self.change)}.items():
            said = declined(name, given.optimizer)
            if (why := reason or said) is not None:
                refused[name] = why
            else:
                forms.append(_form(name, given))
        return forms, refused


def _on_ranks(given: GivenOptimizer) -> tuple[list[StatesOption], dict[str, Reason]]:
    """The states of a rank's parts of the parameters, as they are."""
    reason = Unsupported("on a mesh the optimizer is stock torch's, of sharded parameters")
    return [given.given], dict.fromkeys((EIGHT_BIT, "on the host", CONSUMED), reason)


def _form(name: str, given: GivenOptimizer) -> StatesForm:
    """A form by its name; on CPUs states in 8 bits are updated piece by piece."""
    if name == GIVEN:
        return given.given.form
    piece = CPU_PIECE if given.target.device == "cpu" else 0
    return StatesForm(name, False, piece if name in (EIGHT_BIT, LION8) else 0)


def _way_of(given: GivenOptimizer, option: StepOption) -> StatesOption:
    """The way of an option's settings, which may come from a file.

    Raises:
        FormatError: it cannot be had of this optimizer.
    """
    form, on_host, consumed = (
        option.setting("form", str),
        option.setting("on_host", bool),
        option.setting("consumed", bool),
    )
    known = form in (GIVEN, EIGHT_BIT, *CHANGES)
    reason = (
        (declined(form, given.optimizer) if form != GIVEN else None)
        if known
        else Unsupported.of("{} is no form of states", repr(form))
    )
    if reason is None and on_host and given.no_host() is not None:
        reason = Unsupported("they cannot lie on the host")
    reason = reason or (one_by_one(given.optimizer) if consumed else None)
    if reason is not None:
        said = f"form {form}, on_host {on_host}, consumed {consumed}"
        raise FormatError(
            f"The plan's optimizer states ({said}) are not possible with this optimizer: {reason}. Plan "
            "again."
        )
    return given.way(_form(form, given), on_host=on_host, consumed=consumed)


# ------------------------------------------------------------------ what the plan says


def _told(taken: StatesOption, given: StatesOption, outcome: StepOutcome) -> Iterator[Decision]:
    """One for the states, and one for the gradients where they are consumed."""
    yield Decision(
        site=SITE, kind=KIND, option=taken.label, baseline=given.label, by=States.name, cost=_cost(taken),
        baseline_cost=_cost(given), why=_why(taken, given), settings=taken.settings,
    )  # fmt: skip
    if taken.consumed:
        yield Decision(
            site=f"{SITE}.gradients", kind="gradient", option="consumed in the backward",
            baseline="kept until the step", by=States.name, cost=Cost(),
            baseline_cost=Cost(bytes_transient=_consumed_bytes(outcome.cut.step)),
            why=Because("each is freed as soon as its parameter is updated"),
        )  # fmt: skip


def _consumed_bytes(step: Step) -> int:
    return sum(
        n.meta["val"].numel() * n.meta["val"].element_size()
        for n, name in step.parameters.items()
        if name in step.consumed
    )


def as_given(option: StatesOption) -> Decision:
    """What a plan says of states that nothing else is offered for."""
    cost = _cost(option)
    return Decision(
        site=SITE, kind=KIND, option=option.label, baseline=option.label, by=States.name, cost=cost,
        baseline_cost=cost, why=_why(option, option), settings=option.settings,
    )  # fmt: skip


def _cost(option: StatesOption) -> Cost:
    provenance = Provenance.MEASURED if option.measured else Provenance.MODELLED
    return Cost(
        seconds=option.seconds, bytes_kept=option.resident_bytes, bytes_transient=option.working_bytes,
        bytes_link=option.link_bytes, provenance=provenance,
    )  # fmt: skip


def _why(taken: StatesOption, given: StatesOption) -> Reason:
    if taken.label == given.label:
        return Kept(bytes=taken.resident_bytes)
    return Frees(
        bytes=given.resident_bytes - taken.resident_bytes, seconds=max(0.0, taken.seconds - given.seconds),
        throughout=True, host_bytes=taken.host_bytes if taken.on_host else 0, link_bytes=taken.link_bytes,
    )  # fmt: skip


def _notes(states: StatesOption) -> list[Reason]:
    """What the user must know of a changed optimizer."""
    notes: list[Reason] = []
    if (name := states.form.name) in CHANGES:
        kind, rate, decay = CHANGES[name]
        text = (
            "another optimizer, as allowed by states.change: {name}, with the given learning rate × {} "
            "and weight decay × {}"
        )
        notes.append(Because(text, (kind, rate, decay)))
    if states.consumed:
        notes.append(
            Because(
                "gradients are consumed in the backward: nothing may clip, accumulate or read them; call "
                "step() after every backward"
            )
        )
    return notes
