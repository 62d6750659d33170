"""What was found on the way to a plan: reasons that stand in its notes, and beside its checks and the
backends that were considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from effcompile.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class Together(Reason):
    """Several facts of one thing."""

    facts: tuple[Reason, ...]
    kind: Literal["together"] = "together"

    @classmethod
    def of(cls, facts: Sequence[Reason]) -> Reason | None:
        """None for none, and one by itself."""
        return cls(tuple(facts)) if len(facts) > 1 else next(iter(facts), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Reason):
    """It was tried and raised: the message of that."""

    kind: Literal["failed"] = "failed"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBuilt(Reason):
    """It was predicted to take so many times as long as the best."""

    kind: Literal["not built"] = "not built"
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected(Reason):
    """In this round the measured error was another than the predicted one: solved again with errors scaled by
    `factor`.

    `emulated`: it was that of the emulated arithmetic; nothing was lowered. `rounding`: the factor of what is
    rounded to 16 bits, where that is another one; 0 where none was told.
    """

    kind: Literal["corrected"] = "corrected"
    round: int
    measured: float
    predicted: float
    factor: float
    emulated: bool = False
    rounding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse(Reason):
    """The host memory that held values at its highest, as measured, and where it is."""

    kind: Literal["host use"] = "host use"
    bytes: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured(Reason):
    """The original step was not measured beside the planned one."""

    kind: Literal["unmeasured"] = "unmeasured"
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding(Reason):
    """A padded mask changes the model's own output by this relative error; 0: the model ignores the mask."""

    kind: Literal["padding"] = "padding"
    effect: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Equals(Reason):
    """The captured graph equals the model on these inputs."""

    kind: Literal["equals"] = "equals"
    inputs: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Of(Reason):
    """What is known of something that has a name."""

    name: str
    known: Reason | None = None
    kind: Literal["of"] = "of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Reason):
    """Of the whole gradient with the model's own; and what is known of one parameter's alone, whose error is
    the largest.
    """

    kind: Literal["cosine"] = "cosine"
    cosine: float
    alone: Reason | None
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Nats(Reason):
    """Cross entropy of a text's tokens beside the model's own, per token."""

    kind: Literal["nats"] = "nats"
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeErrors(Reason):
    """Below which error a share of all inputs of a kind lies, by the spread of the errors of so many."""

    kind: Literal["errors alike"] = "errors alike"
    count: int
    share: float
    below: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates(Reason):
    """Tokens a second in each regime, and the model's own, measured interleaved."""

    kind: Literal["token rates"] = "token rates"
    prefill: float
    prefill_before: float
    decode: float
    decode_before: float
