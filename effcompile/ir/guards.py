"""What a capture took for granted, as data: a plan lists it, and every call of an Executable checks it.

TorchDynamo's guards are the model. A guard is never read back from a plan: its text says what was true, for
people and for diffs; what checks it is recorded anew wherever a model is captured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from effcompile.core.reasons import Reason
from effcompile.core.types import Kwargs, Value

#: What a guard is about, in the order in which a report counts them.
Kind = Literal[
    "input", "attribute", "tensor", "weight", "module", "hook", "mode", "global", "class", "setting"
]
_PLURALS = {"class": "classes", "mode": "modes of modules"}
_LONGEST = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One thing that must be as it was when the plan was made.

    Attributes:
        kind: what it is about.
        place: where it stands, as one would write it: `inputs['mask']`, `model.encoder.layers.0.dropout.p`.
        expected: its value or state, as text.
    """

    kind: Kind
    place: str
    expected: str


class Place(Protocol):
    """Where a value stands in a call."""

    @property
    def guarded(self) -> str:
        """As a guard names it: `inputs['batch']['mask']`."""


class CallGuards(Protocol):
    """Finds a call's tensors, and checks the rest of its arguments; see `capture/calls.py`."""

    @property
    def tensors(self) -> Sequence[tuple[Place, object]]:
        """Where the tensors stand, and the example's, in the order of the graph's inputs."""

    def take(self, args: Sequence[object], kwargs: Kwargs) -> list[Value]:
        """The call's tensors. Raises GuardError where the arguments are others than at capture."""

    def listed(self) -> Iterable[Guard]:
        """The plain values that are checked."""

    @property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that can be given by position."""

    def texts(self, *, given: bool) -> dict[str, str]:
        """Place → value as text, of what was given beside the tensors, or of what was left out."""


class StateGuards(Protocol):
    """Checks that a model is still what was captured; see `capture/state.py`."""

    def check(self) -> None:
        """Raises GuardError naming the first thing that changed."""

    def check_weights(self) -> None:
        """Look at every byte of the weights. Raises GuardError naming the first that changed."""

    def settle(self) -> tuple[Reason, ...]:
        """Leave out what the forward itself has changed since the capture; returns a note about it, or
        nothing.
        """

    def bound_to(self, *models: Any) -> StateGuards:
        """The same for another instance of the model: a copy; a second one is the same model as its
        executable.
        """

    def listed(self) -> Iterable[Guard]:
        """What is checked."""


def same(a: object, b: object) -> bool:
    """Whether two plain values are one to a graph that has the first of them as a constant.

    1 is not True, 0.0 is not -0.0, and NaN is NaN.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (
            math.isnan(a) and math.isnan(b)
        )
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def described(value: object) -> str:
    """A value as the text of a guard or of an error."""
    text = repr(value) if not callable(value) else getattr(value, "__qualname__", repr(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def counted(guards: Iterable[Guard]) -> str:
    """How many there are of which kind: `3 inputs, 12 attributes, 199 weights`."""
    counts = Counter(guard.kind for guard in guards)
    order = Kind.__args__  # type: ignore[attr-defined]
    return ", ".join(
        f"{counts[kind]} {kind if counts[kind] == 1 else _PLURALS.get(kind, f'{kind}s')}"
        for kind in order
        if counts[kind]
    )
