"""What the exporters have in common: the division that is written, and what of it an engine cannot say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from effcompile.core.units import format_bytes
from effcompile.ir.distributed import Distributed
from effcompile.ir.strategy import Engine, Strategy

#: What no engine but ours can be told.
PLANNED = "what each layer keeps is our solver's choice. Plan with recompute=none or recompute=full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A plan's division of a model's step."""

    model: str
    found: Distributed

    @property
    def strategy(self) -> Strategy:
        return self.found.strategy

    @property
    def layers(self) -> int:
        """Of the model."""
        return sum(self.strategy.cuts)

    @property
    def header(self) -> tuple[str, ...]:
        """What every file says of itself."""
        f, s = self.found, self.strategy
        axes = (
            ", ".join(
                f"{axis}={size}"
                for axis, size in (("dp", s.dp), ("tp", s.tp), ("pp", s.pp), ("cp", s.cp))
                if size > 1
            )
            or "dp=1"
        )
        low, high = format_bytes(f.low_bytes), format_bytes(f.high_bytes)
        return (
            f"{self.model} on {f.devices} devices: {axes}, zero={s.zero}, recompute={s.recompute}, "
            f"{s.precision}; written by effcompile.",
            f"Predicted peak of the fullest rank under this engine: {format_bytes(f.peak_bytes)} ({low} "
            f"to {high}).",
            f"{f.global_batch} sequences of {f.sequence} tokens a step: {f.micro_batches} micro-batches "
            f"of {s.micro_batch} on each rank.",
        )


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """An engine's file.

    Attributes:
        judged: the engine whose buffers a plan for it counts.
        write: the text.
        cannot: part of a strategy → (whether it is there, why the engine cannot say it), asked in this order.
        recompute: the rules of recomputation that it has.
    """

    judged: Engine
    write: Callable[[Subject], str]
    recompute: tuple[str, ...]
    cannot: Mapping[str, tuple[Callable[[Strategy], bool], str]] = field(default_factory=dict)

    def refused(self, subject: Subject) -> Iterator[tuple[str, str]]:
        """(part of the strategy, why it cannot be said)."""
        s = subject.strategy
        for part, (there, reason) in self.cannot.items():
            if there(s):
                yield part, reason
        if s.recompute not in self.recompute:
            known = ", ".join(self.recompute)
            yield (
                f"recompute={s.recompute}",
                PLANNED if s.recompute == "planned" else f"it knows {known}. Plan with one of these",
            )


def no_axis(axis: str, reason: str) -> dict[str, tuple[Callable[[Strategy], bool], str]]:
    """An axis that an engine does not divide along."""
    return {f"{axis} > 1": (lambda s: getattr(s, axis) > 1, reason)}
