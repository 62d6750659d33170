"""Contexts: the longest that a model has positions for, and the longest that fits in a memory."""

from __future__ import annotations

from typing import Any

from effcompile.capture.generation import GenerationStep
from effcompile.core.causes import LargestContext
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.types import HFModel
from effcompile.estimate.timeline import timeline
from effcompile.search.generation.cases import filled

#: Learned or tabulated positions end; rotary ones are computed, and a model's own limit is what it was
#: trained for.
_POSITIONS = ("n_positions", "max_target_positions", "max_position_embeddings")


def fitting(model: HFModel, context: int) -> None:
    """Make sure that the model has positions for a context.

    Raises:
        UsageError: it has not.
    """
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if config is not None else None
    most = next(
        (size for name in _POSITIONS if isinstance(size := getattr(decoder, name, None), int) and size > 0),
        None,
    )
    if most is not None and context > most:
        raise UsageError(
            f"context = {context} is longer than {type(model).__name__} has positions for: {most} (its "
            f"config). Give context={most} or less."
        )


def largest_context(error: InfeasibleError, step: GenerationStep, goal: Goal, chunk: int) -> InfeasibleError:
    """The error with the largest context that fits, where memory is what binds and the least that weights
    need is known. `chunk`: tokens of a prompt that are read at once.
    """
    if goal.memory is None or not error.needed:
        return error
    context = goal.tokens[0]
    held = lambda tokens: step.layout.nbytes(tokens, goal.batch) + _workspace(step, goal.batch, tokens, chunk)  # noqa: E731
    weights = error.needed - held(context)
    low, high = 0, context
    while high - low > max(1, context // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if middle < 2 or weights + held(middle) <= goal.memory else (low, middle)
    fits = low if low >= 2 and weights + held(low) <= goal.memory else 0
    return InfeasibleError(
        *error.why,
        LargestContext(context=fits, weights=max(0, weights)),
        binding=error.binding,
        nearest=error.nearest,
    )


def _workspace(step: GenerationStep, batch: int, tokens: int, chunk: int) -> int:
    """Bytes of activations at the end of so many: of a chunk of a prompt, or of one token."""
    ends = (
        filled(step, step.program, batch=batch, context=tokens, new=new)
        for new in (max(1, min(chunk, tokens - 1)), 1)
    )
    return max(timeline(end).activation_bytes for end in ends)
