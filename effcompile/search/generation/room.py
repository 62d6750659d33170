"""Contexts: the longest that a model has positions for, and the longest that fits in a memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from effcompile.capture.generation import GenerationStep
from effcompile.core.causes import LargestContext, TookMore
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.torch_compat import fake_mode
from effcompile.core.types import HFModel
from effcompile.estimate.timeline import timeline
from effcompile.ir.cache import Growth
from effcompile.ir.program import Program, dtype_of
from effcompile.runtime.generation.steps import input_bytes
from effcompile.search.generation.cases import filled

#: Learned or tabulated positions end; rotary ones are computed, and a model's own limit is what it was
#: trained for.
_POSITIONS = ("n_positions", "max_target_positions", "max_position_embeddings")
#: Bytes of one that torch makes a tensor of.
_NUMBER = 8


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


def largest_context(
    error: InfeasibleError, step: GenerationStep, goal: Goal, chunk: int, seen: tuple[int, int] = (0, 0)
) -> InfeasibleError:
    """The error with the largest context that fits, where memory is what binds and the least that weights
    need is known. `chunk`: tokens of a prompt that are read at once. `seen`: `images` of `workspace`, which
    a context has room for.
    """
    if goal.memory is None or not error.needed:
        return error
    context = goal.tokens[0]
    inside = partial(workspace, step, goal.batch, chunk=chunk, images=seen)
    held = lambda tokens: step.layout.nbytes(tokens, goal.batch) + inside(context=tokens)  # noqa: E731
    weights = error.needed - held(context)
    least = max(2, seen[0] + 1)
    low, high = 0, context
    while high - low > max(1, context // 64):
        middle = (low + high) // 2
        low, high = (
            (middle, high) if middle < least or weights + held(middle) <= goal.memory else (low, middle)
        )
    beyond = sum(cause.over for cause in error.why if isinstance(cause, TookMore))
    fits = low if low >= least and weights + held(low) <= goal.memory else 0
    return InfeasibleError(
        *error.why,
        LargestContext(context=fits, weights=max(0, weights - beyond)),
        binding=error.binding,
        nearest=error.nearest,
    )


def workspace(
    step: GenerationStep, batch: int, context: int, chunk: int, *, lean: bool = True,
    images: tuple[int, int] = (0, 0),
) -> int:  # fmt: skip
    """Most bytes beside weights and cache in a call whose tokens fill a context: inputs, and activations at
    its end, of a chunk or of one token.

    `lean`: see `filled`. `images`: tokens of a row, the last ones, that are images', and of one of these,
    which is read whole where a step is told which tokens are images'.
    """
    seen, each = images
    most = min(chunk + max(0, each - 1) * (chunk < context and bool(step.boundary.kinds)), context)
    sized = partial(filled, step, step.program, batch=batch, context=context, lean=lean)
    ends = (sized(new=most, images=batch * min(seen, most)), sized(new=1))
    windows = {leaf.layer for leaf in step.layout if leaf.growth is Growth.WINDOW}
    # a layer of Hugging Face's with a window holds its length as a tensor
    beside = input_bytes(step.boundary, batch, context, most) + _NUMBER * len(windows)
    beside += batch * (seen + (most < context) * min(seen, most)) * _row_bytes(step)
    return beside + max(_activation_bytes(_dense(end)) for end in ends)


def _row_bytes(step: GenerationStep) -> int:
    """Of an image token, of all tensors that a step takes."""
    return sum(rows[:1].nbytes for rows in step.program.kwargs.get("images", ()))


def _activation_bytes(program: Program) -> int:
    """At the highest instant, with the numbers that operators take as tensors while they run."""
    found = timeline(program)
    nodes = {node.name: node for node in program.graph.nodes}
    peak = max(live + _number_bytes(nodes[name]) for name, live in found.steps)
    return peak - found.weight_bytes - found.input_bytes


def _number_bytes(node: fx.Node) -> int:
    """Of a number beside a tensor: as torch makes one of it, and once more in the tensor's dtype."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return 0
    asked = zip(node.args, schema.arguments, strict=False)
    given = [arg for arg, each in asked if isinstance(arg, int | float) and str(each.type) == "Tensor"]
    dtype = dtype_of(node)
    same = dtype is None or dtype is torch.int64 or dtype is torch.float64
    return len(given) * (_NUMBER + (0 if same or dtype is None else dtype.itemsize))


def _dense(program: Program) -> Program:
    """With an example that lies as tensors of these sizes do, and has no memory either: torch's attention
    takes another way where rows do not lie side by side.
    """
    with fake_mode():
        like = partial(torch.empty_like, memory_format=torch.contiguous_format)
        return replace(program, kwargs=tree_map_only(torch.Tensor, like, dict(program.kwargs)))
