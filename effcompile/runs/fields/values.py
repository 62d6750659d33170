"""What a stage's fields may look at: all their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effcompile.compiler import Batch
from effcompile.runs.scoring import Scores


@dataclass(frozen=True, kw_only=True)
class StageValues:
    """The values; `Stage` says what each means, and that they are sound."""

    steps: int
    name: str = ""
    sequence: int | None = None
    image: int | None = None
    depth: int | None = None
    move: str = "stack"
    layers: float | None = None
    tokens: float | None = None
    sparsity: float | None = None
    backward_sparsity: float | None = None
    precision: str | None = None
    average: int | None = None
    data: float | None = None
    scores: Scores | None = None
    init: str | None = None
    until: str | None = None
    batch: Batch = None
    max_error: float | None = None
    passes: Sequence[str] | None = None
