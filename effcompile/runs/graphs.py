"""The graphs of a stage: each planned, and one drawn for every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import nn

from effcompile.api import optimize
from effcompile.capture.training import Loss
from effcompile.compiler import TrainingExecutable
from effcompile.core.types import Example
from effcompile.machine.target import Target
from effcompile.runs.entering import Entered
from effcompile.runs.fields.base import Graph
from effcompile.runs.pricing import limits


class Common(TypedDict, total=False):
    """What all stages are planned with, beside the memory."""

    target: str | Target
    loss: Loss | None


def planned_graphs(
    model: nn.Module,
    entered: Entered,
    example: Example,
    batch: int | None,
    memory: int | str | None,
    common: Common,
) -> list[TrainingExecutable]:
    """The planned models of the graphs of a stage that was entered, with these inputs; the first has the
    optimizer.
    """
    made: list[TrainingExecutable] = []
    for graph, most in zip(entered.graphs, limits(entered, memory, common["target"]).memory, strict=True):
        optimizer = None if made else entered.optimizer
        with entered.around(graph):
            planned = optimize(
                model, inputs=example, mode="training", optimizer=optimizer, batch=batch,
                passes=entered.passes, max_error=entered.stage.max_error, memory=most, **common,
            )  # fmt: skip
        made.append(planned)
    return made


def drawn(graphs: Sequence[Graph], number: int, step: int) -> int:
    """Which of its graphs a stage takes at a step: drawn by the two numbers, so that a run that is resumed
    draws the same.
    """
    if len(graphs) == 1:
        return 0
    generator = torch.Generator().manual_seed(7919 * number + step)
    return int(torch.multinomial(torch.tensor([graph.share for graph in graphs]), 1, generator=generator))
