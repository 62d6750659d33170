"""What a call of a step costs beside its graph: arguments checked, mask and positions made, the cache read
and written layer by layer, an output built. None of it is an operator; of a small model it is a part of a
token that shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effcompile.capture.caches import cache_name, new_cache, seen_by
from effcompile.capture.generation import GenerationStep, encoder_output
from effcompile.core.goal import Goal
from effcompile.core.timing import SETTLED, median_seconds
from effcompile.core.types import HFModel
from effcompile.ir.cache import Growth
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import CacheRoom, LoweredStep
from effcompile.runtime.inputs import tables_of


def call_seconds(step: GenerationStep, model: HFModel, goal: Goal) -> float:
    """Seconds of a call of one token a row whose graph computes nothing: measured; 0 of a model without
    data.
    """
    if model.device.type == "meta":
        return 0.0
    like: Sequence[torch.Tensor] = step.program.kwargs["past"]
    first = len(step.program.inputs) - len(like)
    logits = like[0].new_zeros((goal.batch, 1, 1))
    cross = [
        leaf[:1].expand(goal.batch, *leaf.shape[1:])
        for leaf, what in zip(like, step.layout, strict=True)
        if what.growth is Growth.SOURCE
    ]

    def nothing(*flat: torch.Tensor) -> list[torch.Tensor]:
        return [logits, *(flat[first + at] for at in step.layout.written)]

    lowered = LoweredStep(
        boundary=step.boundary, layout=step.layout, room=CacheRoom(context=goal.tokens[0]),
        inputs=step.program.inputs, tables=tables_of(step.program), run=nothing, source=lambda *_: cross,
        image=step.image,
    )  # fmt: skip
    stepper, cache = Stepper(lowered, type(model).forward, model.config), new_cache(model)
    given = {step.boundary.tokens: torch.ones((goal.batch, 1), dtype=torch.int64, device=model.device)}
    if cross:
        hidden = logits.new_zeros((goal.batch, cross[0].shape[2], model.config.hidden_size))
        given["encoder_outputs"] = encoder_output(hidden)

    def call() -> None:
        nonlocal cache
        if seen_by(cache) >= goal.tokens[0]:  # each call makes it longer by a token
            cache = new_cache(model)
        stepper(**given, **{cache_name(model): cache})

    return median_seconds(call, settled=SETTLED)
