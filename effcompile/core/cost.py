"""What an option costs: a small frozen sum with its units in its names, and where the figures come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Provenance(StrEnum):
    """Where a figure comes from, weakest last, so that `max` of a sum keeps the weakest."""

    MEASURED = "measured"  # timed on this machine, at this shape or interpolated between measured shapes
    MODELLED = "modelled"  # roofline from the target's peaks
    PUBLISHED = "published"  # somebody else's measurement, not reproduced here


_STRENGTH = {Provenance.MEASURED: 0, Provenance.MODELLED: 1, Provenance.PUBLISHED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one option adds to the whole plan. Costs of different sites add.

    Attributes:
        seconds: time added to one call. May be negative for an option that modifies others (a fusion).
        weight_bytes: bytes of parameters and constants kept for the life of the model.
        bytes_kept: bytes of activations kept from where they are made until their last reader.
        bytes_transient: workspace alive only while the option runs.
        bytes_link: bytes moved over the host link per call.
        error_squared: contribution to ‖y − y₀‖² / ‖y₀‖² of the model's output. Quantisation errors of
            different sites are nearly uncorrelated, so their squares add (HAWQ-V2, Dong et al. 2020, §3).
        roof_seconds: the least that the arithmetic of its products takes at the machine's peak rates, of
            those that are known (the compute roof of Williams et al. 2009); 0 for what is no product.
        provenance: the weakest source among the figures.
    """

    seconds: float = 0.0
    weight_bytes: int = 0
    bytes_kept: int = 0
    bytes_transient: int = 0
    bytes_link: int = 0
    error_squared: float = 0.0
    roof_seconds: float = 0.0
    provenance: Provenance = Provenance.MEASURED

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            seconds=self.seconds + other.seconds,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            bytes_kept=self.bytes_kept + other.bytes_kept,
            bytes_transient=max(self.bytes_transient, other.bytes_transient),
            bytes_link=self.bytes_link + other.bytes_link,
            error_squared=self.error_squared + other.error_squared,
            roof_seconds=self.roof_seconds + other.roof_seconds,
            provenance=max(self.provenance, other.provenance, key=_STRENGTH.__getitem__),
        )

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest instant."""
        return self.weight_bytes + self.bytes_kept + self.bytes_transient

    @property
    def error(self) -> float:
        """Relative L2 error this cost alone would cause at the output."""
        return math.sqrt(self.error_squared)

    def with_error_scaled(self, factor: float) -> Cost:
        """The same cost with its squared error multiplied, after a measured error corrected the model."""
        return replace(self, error_squared=self.error_squared * factor)


def total(costs: list[Cost]) -> Cost:
    """The sum of costs; the zero cost for an empty list."""
    return sum(costs, start=Cost())
