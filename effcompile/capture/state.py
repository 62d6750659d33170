"""Whether the model is what it was when it was captured.

Facts recorded once (snapshot.py), compared by identity at each call.

Only where an object is another one, the model is walked again and the facts are compared by value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from effcompile.capture import reads as code
from effcompile.capture.config_reads import ConfigReads
from effcompile.capture.facts import Fact, is_plain
from effcompile.capture.snapshot import Snapshot
from effcompile.capture.tensors import Checksums
from effcompile.core.errors import CaptureError, GuardError
from effcompile.core.reasons import Because, Reason
from effcompile.ir.guards import Guard, Kind

#: A note in the plan of a model that is too large to be looked at whole at each call.
_SUMMED = (
    "a write to some elements of a weight through .data, which torch does not count, is noticed within {} "
    "calls, as each looks at another part; executable.check_weights() looks at all"
)

#: A note in the plan of a forward that keeps something for whoever looks at it.
_LEFT = (
    "not followed, for the forward itself changes them at each call, and a planned call leaves them "
    "as they are: {name}"
)


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that no longer holds; None where something is there, or gone, that was not."""

    place: str
    was: Fact | None
    now: Fact | None

    @property
    def kind(self) -> Kind:
        found = self.was or self.now
        assert found is not None
        return found.kind


class ModelGuards:
    """What a captured model must still be. See `ir.guards.StateGuards`.

    Args:
        model, others: the model, and the executable that stands for it.
        training: whether its parameters may change.
        mended: names of attributes that the graph does not depend on, as capture mended what they say.
        configurations: what of its configurations capture saw it read.
        beside: what is called beside the model, by name: its loss.
        minds_gradients: whether its forward is another one where gradients are enabled; it was captured where
            they are not.
    """

    def __init__(
        self, model: nn.Module, *others: nn.Module, training: bool, mended: Collection[str] = (),
        configurations: ConfigReads | None = None, beside: Mapping[str, object] = MappingProxyType({}),
        minds_gradients: bool = False,
    ) -> None:  # fmt: skip
        self._training, self._without, self._left = training, frozenset[str](), frozenset[str]()
        self._roots = dict(zip(("model", "executable"), (model, *others), strict=False))
        self._stale: GuardError | None = None
        self._name = type(model).__name__
        self._beside = beside
        self._reads = code.reads_of(model, *beside.values(), configurations=configurations)
        self._reads.minds_gradients = minds_gradients
        self._snapshot = self._taken_at_capture()
        if free := frozenset(place for place in self._snapshot.facts if place.rpartition(".")[2] in mended):
            self._without = free
            self._snapshot = self._taken_at_capture()
        self._first = frozenset(self._snapshot.facts)
        self._sums, self._mode = Checksums(()), model.training

    @property
    def may_keep(self) -> bool:
        """Whether the user's own code may keep something from one call for the next."""
        return self._reads.keeps

    @property
    def names_gradients(self) -> bool:
        """Whether the user's own code asks if gradients are enabled."""
        return any("is_grad_enabled" in function.__code__.co_names for function in self._reads.functions)

    def check(self) -> None:
        """Raise GuardError where the model's own forward would now be another one than the one captured.

        An attribute that was set to an equal value is none: from then on that object is watched.
        """
        if self._stale is not None:
            raise self._stale
        if not self._snapshot.unchanged():
            fresh = self._taken()
            for change in self._changes(fresh):
                raise GuardError(_refusal(self._name, change), place=change.place, of_model=True)
            self._snapshot = fresh
        mode = next(iter(self._roots.values())).training
        if mode is not self._mode:  # somebody may have trained it meanwhile
            self.check_weights()
            self._mode = mode
        elif (changed := self._sums.changed()) is not None:
            raise self._overwritten(changed)

    def leave(self, places: Collection[str]) -> None:
        """Do not follow these attributes: the forward changes them, and does not depend on them."""
        if places:
            self._left |= frozenset(places)
            self._without |= self._left
            self._snapshot = self._taken_at_capture()

    def check_weights(self) -> None:
        """See `ir.guards.StateGuards`."""
        if (changed := self._sums.changed_anywhere()) is not None:
            raise self._overwritten(changed)

    def _overwritten(self, tensor: torch.Tensor) -> GuardError:
        place, fact = next(
            (place, fact) for place, fact in self._snapshot.facts.items() if fact.value is tensor
        )
        return GuardError(_refusal(self._name, Change(place, fact, fact)), place=place, of_model=True)

    def settle(self) -> tuple[Reason, ...]:
        """See `ir.guards.StateGuards`."""
        summed = self._sums.tensors if self._snapshot.unchanged() else ()
        fresh = self._taken_at_capture()
        changes = list(self._changes(fresh))
        if changes:
            self._refuse_state([change for change in changes if self._is_state(change)])
            places = {change.place for change in changes}
            self._without |= (
                places
                | {place.removeprefix("len(").rstrip(")") for place in places}
                | {p.rpartition("[")[0] for p in places}
            )
            fresh = self._taken_at_capture()
        self._snapshot = fresh
        kept = {
            place
            for place, fact in fresh.facts.items()
            if fact.is_kept and place.rpartition(".")[2] in self._reads.stored
        }
        names = sorted({change.place for change in changes} | kept | self._left)
        notes = [Because(_LEFT, (", ".join(names),))] * bool(names)
        if not self._training:
            if [*map(id, summed)] != [*map(id, fresh.tensors)]:  # half a second of a large model
                self._sums = Checksums(fresh.tensors)
            notes += [Because(_SUMMED, (self._sums.calls,))] * (self._sums.calls > 1)
        return tuple(notes)

    def bound_to(self, *models: nn.Module) -> ModelGuards:
        """See `ir.guards.StateGuards`. What has changed before is not forgotten."""
        if tuple(self._roots.values()) == models:
            return self
        read = self._reads.configurations.of_copy(next(iter(self._roots.values())), models[0])
        other = ModelGuards(
            *models,
            training=self._training,
            configurations=read,
            beside=self._beside,
            minds_gradients=self._reads.minds_gradients,
        )
        other._without, other._left = self._without, self._left
        other._snapshot = other._taken_at_capture()
        try:
            self.check()
        except GuardError as error:
            other._stale = error
        return other

    def listed(self) -> Iterator[Guard]:
        """See `ir.guards.StateGuards`."""
        return (
            Guard(kind=fact.kind, place=place, expected=fact.text)
            for place, fact in self._snapshot.facts.items()
        )

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(place, tensor) of those that the forward may read and that are no weights of the model's."""
        for place, fact in self._snapshot.facts.items():
            if isinstance(fact.value, torch.Tensor) and fact.kind != "weight":
                yield place, fact.value

    def _is_state(self, change: Change) -> bool:
        """Whether a value that the forward changed is also read by it, for more than to count it up."""
        plain = all(fact is not None and is_plain(fact.value) for fact in (change.was, change.now))
        name = change.place.partition(" in ")[0].partition("[")[0].rpartition(".")[2]
        return plain and not change.place.startswith("len(") and name in self._reads.used

    def _refuse_state(self, changes: Sequence[Change]) -> None:
        for change in changes:
            assert change.was is not None and change.now is not None
            raise CaptureError(
                f"The forward of {self._name} changes {change.place} at each call, from {change.was.text} to "
                f"{change.now.text}, and reads it: no call is like the last one, and a graph has one value "
                "of it. Keep it in a buffer (register_buffer), or give it as an input."
            )

    def _taken(self) -> Snapshot:
        return Snapshot(
            self._roots, self._reads, training=self._training, without=self._without, beside=self._beside
        )

    def _taken_at_capture(self) -> Snapshot:
        """As it stands, but with gradients as capture had them."""
        with torch.set_grad_enabled(self._training):
            return self._taken()

    def _changes(self, fresh: Snapshot) -> Iterator[Change]:
        before, now = self._snapshot.facts, fresh.facts
        for place in dict.fromkeys((*before, *now)):
            change = Change(place, before.get(place), now.get(place))
            if not self._holds(change):
                yield change

    def _holds(self, change: Change) -> bool:
        was, now = change.was, change.now
        if was is not None and now is not None:
            thawed = change.place.endswith(".requires_grad") and was.value is True
            return was.equals(now) or thawed
        unnamed = change.kind == "attribute" and change.place.rpartition(".")[2] not in self._reads.names
        # it was not there when the model was captured
        return unnamed and (was is None or change.place not in self._first)


def _refusal(name: str, change: Change) -> str:
    """The error's text: what it was, what it is, and what to do."""
    if change.place == "executable.forward":
        return (
            f"The forward of the planned {name} was wrapped after it was planned, as accelerate and Trainer "
            "do for mixed precision (bf16=True, fp16=True). Give no inputs to effcompile.optimize(model, "
            "mode='training', ...), so that the step is planned at its first call, within theirs; or leave "
            "theirs out and let the plan compute in 16 bits, with passes=['precision']."
        )
    was, now = (None if fact is None else fact.text for fact in (change.was, change.now))
    said = (
        f"is new ({now})" if was is None else
        f"is gone (it was {was})" if now is None else
        "was changed" if was == now else
        f"was {was} and is {now} now"
    )  # fmt: skip
    # a write in place is counted, whatever is written: putting values back is another one
    mend = "Call" if said == "was changed" else "Put it back, or call"
    return (
        f"{change.place} {said} since {name} was planned, whose graph has what it was then. {mend} "
        "effcompile.optimize again."
    )
