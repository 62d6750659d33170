"""The regimes of a generation: a prompt once, and each new token behind a cache.

The search itself is search/search.py's.

    seconds = calls of the prefill × prefill + new tokens × decode
    bytes = weights once + cache of the whole context + workspace

A linear's format is one choice for both; errors and limits add up as they do for a forward call.
"""

from __future__ import annotations

import math

from effcompile.capture.generation import GenerationStep
from effcompile.core.goal import Goal
from effcompile.search.generation.cases import filled
from effcompile.search.generation.room import workspace
from effcompile.search.regimes import Regime, Regimes


def regimes_of(step: GenerationStep, goal: Goal, chunk: int) -> Regimes:
    """Both, and what memory has to hold at the end of the context: the cache, and the activations of a chunk
    or of a token.
    """
    context, prompt, new = goal.tokens
    beside, copied = (workspace(step, goal.batch, context, chunk, lean=lean) for lean in (True, False))
    chunk = min(chunk, prompt)
    at = lambda end, count: filled(step, step.program, batch=goal.batch, context=end, new=count)  # noqa: E731
    cache_bytes = step.layout.nbytes(context, goal.batch)
    return Regimes(
        each=(
            Regime(
                name="prefill",
                program=at(max(chunk, (prompt + chunk) // 2), chunk),
                calls=math.ceil(prompt / chunk),
            ),
            Regime(name="decode", program=at(min(context, prompt + max(1, new // 2)), 1), calls=new),
        ),
        weight_bytes=step.program.weight_bytes(),
        kept_bytes=cache_bytes + beside,
        copied_bytes=cache_bytes + copied - beside,
    )
