"""Tiny models for stages, and a run's shortest way through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from effcompile.runs import Run, Stage, schedule

#: Levers that have nothing to win here are left out: stages are planned fast.
PASSES = ["no-pointwise", "no-loss_head", "states.offload=false"]


class Layer(nn.Module):
    """A residual branch behind its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Stack(nn.Module):
    """Tokens → the loss of each one's label; with layers in a list."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch_at(sequence: int = 8, seed: int = 0, examples: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (examples, sequence), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, -1)}


def made(*stages: Stage, model: nn.Module | None = None, **changes: Any) -> Run:
    """A run of the stages; for a machine that is not here unless `target` says another."""
    model = Stack() if model is None else model
    given = changes.pop("stages", stages)
    asked = {"inputs": lambda stage: batch_at(stage.sequence or 8), "passes": PASSES, "target": "h100-sxm"}
    asked["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    return schedule(model, given, **{**asked, **changes})


def taken(run: Run, each: Callable[[int], None] = lambda count: None) -> list[torch.Tensor]:
    """All steps that are left, on batches by the number of the step; `each` is called after each."""
    losses: list[torch.Tensor] = []
    for stage in run:
        while stage.left:
            losses.append(stage.step(**batch_at(stage.stage.sequence or 8, seed=sum(run.done))))
            each(sum(run.done))
    return losses
