"""The regimes of a generation: an encoder once, a prompt once, and each new token behind a cache.

The search itself is search/search.py's.

    seconds = encoders + calls of the prefill × prefill + new tokens × decode
    bytes = weights once + cache of the whole context + workspace

A linear's format is one choice for both; errors and limits add up as they do for a forward call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, partial

import torch

from effcompile.capture.generation import GenerationStep
from effcompile.core.goal import Goal
from effcompile.estimate.timeline import timeline
from effcompile.ir.program import dtype_of, shape_of, stored_bytes
from effcompile.passes import Pass
from effcompile.search.generation.cases import at_inputs, behind, filled
from effcompile.search.generation.room import workspace
from effcompile.search.generation.sight import Sight, planned_images
from effcompile.search.regimes import Regime, Regimes


def regimes_of(
    step: GenerationStep,
    goal: Goal,
    chunk: int,
    source: Mapping[str, torch.Tensor],
    passes: tuple[Pass, ...] = (),
    beside_call: float = 0.0,
    sight: Sight | None = None,
) -> Regimes:
    """Both, and what memory has to hold at the end of the context: the cache, and the activations of a chunk
    or of a token.

    Of an encoder-decoder its encoder, too, at `source`, and what makes the keys of cross-attention; `passes`
    decide about these two. `beside_call`: seconds of a call of the step that are no operator's; 0: nothing is
    timed here. `sight`: images of the prompt, where the model takes any.
    """
    context, prompt, new = goal.tokens
    before = list(_encoding(step, goal, source, passes)) if step.encoder is not None else []
    positions = shape_of(before[0].program.tensor_results()[0])[1] if before else 0
    step = behind(step, positions) if before else step
    seen = planned_images(sight)
    inside = partial(workspace, step, goal.batch, context, chunk, images=seen)
    beside, chunk = inside(), min(chunk, prompt)
    at = lambda end, count: filled(step, step.program, batch=goal.batch, context=end, new=count)  # noqa: E731
    kept = step.layout.nbytes(context, goal.batch, positions) + beside
    for regime in before[:1]:  # its output, and its mask, which every token is given
        (output,) = regime.program.tensor_results()
        mask = 8 * goal.batch * positions if step.boundary.source_mask else 0
        kept += math.prod(shape_of(output)) * (dtype_of(output) or torch.float32).itemsize + mask
    encoding = [of.activation_bytes + of.input_bytes for of in (timeline(r.program) for r in before)]
    if sight:
        kept += sight.kept_bytes
        encoding.append(sight.given_bytes + sight.working_bytes)
    seeing = [] if sight is None or sight.program is None else [_seeing(sight, goal, passes)]
    graphs = (step.program, *(regime.program for regime in (*before, *seeing)))
    return Regimes(
        each=(
            Regime(
                name="prefill",
                program=at(max(chunk, (prompt + chunk) // 2), chunk),
                calls=math.ceil(prompt / chunk),
                beside=beside_call,
            ),
            Regime(
                name="decode",
                program=at(min(context, prompt + max(1, new // 2)), 1),
                calls=new,
                beside=beside_call,
            ),
            *before,
            *seeing,
        ),
        weight_bytes=stored_bytes(*(graph.module for graph in graphs)) + (sight.weight_bytes if sight else 0),
        kept_bytes=max(kept, *encoding, 0),
        copied_bytes=cache(lambda: step.layout.nbytes(context, goal.batch) + inside(lean=False) - beside),
        own_seconds=sight.seconds() if sight and beside_call else 0.0,
        own_bytes=sight.weight_bytes if sight else 0,
    )


def _seeing(sight: Sight, goal: Goal, passes: tuple[Pass, ...]) -> Regime:
    """An image, and how many there are in a prompt."""
    assert sight.program is not None
    calls = sight.images * goal.batch
    return Regime(name="images", program=sight.program, calls=calls, graph="eye", passes=passes)


def _encoding(
    step: GenerationStep, goal: Goal, source: Mapping[str, torch.Tensor], passes: tuple[Pass, ...]
) -> Iterator[Regime]:
    """What runs once before the first token."""
    assert step.encoder is not None
    assert step.source is not None
    given = {name: value[:1].expand(goal.batch, *value.shape[1:]) for name, value in source.items()}
    encoder = at_inputs(step.encoder, (), given)
    yield Regime(name="encoder", program=encoder, graph="encoder", passes=passes)
    hidden, tokens = step.source.args
    (made,) = (shape_of(node) for node in encoder.tensor_results())
    args = (hidden.new_zeros(()).expand(made), tokens[:1, :1].expand(goal.batch, 1))
    yield Regime(name="source", program=at_inputs(step.source, args, {}), graph="source", passes=passes)
