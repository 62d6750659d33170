"""A prompt of a whole context, of which the first chunk and the last are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from effcompile.core.types import HFModel
from effcompile.ir.cache import Growth
from effcompile.ops.append import lengthened
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import Run


def at_the_ends(stepper: Stepper, model: HFModel, context: int) -> Stepper:
    """The stepper, whose chunks between the first and the last of a context compute nothing and append zeros:
    they hold less than the last, and take most of the time. Itself where what it holds does not follow from
    the tokens' number alone, or calls leave logits of all tokens.
    """
    step = stepper.step
    full = all(leaf.growth is Growth.FULL for leaf in step.layout)
    if not full or not step.boundary.rows or not step.room.chunk or step.device.type != "cpu":
        return stepper
    names = [spec.name for spec in step.inputs]
    tokens, first = names.index("tokens"), len(names) - len(step.layout)

    def passed(run: Run, *flat: torch.Tensor) -> Sequence[torch.Tensor]:
        new, past = flat[tokens].shape[1], flat[first].shape[2]
        if past == 0 or past + new >= context:
            return run(*flat)
        longer = [
            lengthened(rows, new, step.room.capacity(leaf))
            for rows, leaf in zip(flat[first:], step.layout, strict=True)
        ]
        for rows in longer:
            rows[:, :, past:].zero_()
        return [torch.zeros(len(flat[tokens]), 1, 1), *longer]

    many = None if step.many is None else partial(passed, step.many)
    return Stepper(replace(step, run=partial(passed, step.run), many=many), type(model).forward, model.config)
