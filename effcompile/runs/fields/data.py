"""Data importance: a stage that sees the examples of the highest scores only (`effcompile.scores`)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.core.units import format_seconds
from effcompile.runs.fields.base import Effect, check_share
from effcompile.runs.fields.values import StageValues
from effcompile.runs.scoring import Scores


class Data(Effect):
    """`data`: the share of the examples; `scores`: of each of them.

    `Active.examples` are the places of those that are kept.
    """

    name: ClassVar[str] = "data"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_share(stage, "data")
        if not isinstance(stage.scores, Scores):
            raise UsageError(
                "Stage(data=...) wants scores=effcompile.scores(model, batches, loss), one for each "
                "example of the data."
            )

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        scores: Scores = self.stage.scores  # type: ignore[assignment]
        kept, values = self.examples, scores.values
        at_random = float(values.double().mean())
        self.notes.append(
            f"data: {len(kept)} of {len(values)} examples by {scores.kind}, of score "
            f"{float(values[kept].double().mean()):.3g} on average ({at_random:.3g} at random); scoring took "
            f"{format_seconds(scores.seconds)}"
        )

    @property
    def examples(self) -> Tensor:
        """Places of the examples that are kept, ascending."""
        assert isinstance(self.stage.scores, Scores)
        values = self.stage.scores.values
        return torch.topk(values, max(1, round(self.value * len(values)))).indices.sort().values
