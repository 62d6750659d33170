"""A planned generation against the model itself, by teacher forcing: the same text through prefill, chunks
and single tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from effcompile.capture.caches import new_cache
from effcompile.capture.images import ENCODED
from effcompile.capture.mends import evaluating
from effcompile.capture.verify import relative_error
from effcompile.core.findings import Nats
from effcompile.core.goal import Goal
from effcompile.core.types import HFModel, Kwargs
from effcompile.ir.figures import Check
from effcompile.proof.rounding import doubled, exact_limit, in_float64, most_rounding
from effcompile.runtime.generation.executable import LoweredEncoder
from effcompile.runtime.generation.eye import Eye
from effcompile.runtime.generation.images import TextWithImages, between_images
from effcompile.runtime.generation.stepper import Stepper
from effcompile.search.generation.text import CalibrationText

#: Tokens that are decoded one by one.
_DECODED = 12
#: Exact results in fp32 that are given token by token differ by so much from those of one call, whatever the
#: goal's tolerance.
_ROUNDING = 1e-4
#: The most that rounding may explain where states are carried on, which compound it token by token and layer
#: by layer: at the size of Mamba-130m (random weights, 48 tokens) Hugging Face's fp32 is 3.2e-4 from the true
#: value, and so is a step's.
_OF_STATES = 1e-3


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the model itself says of a text: logits at each position, of its own forward without a cache.

    `given`: what encoders are given. `rounding`: how far they are from those in float64; it runs
    the model when called.
    """

    text: torch.Tensor
    logits: torch.Tensor
    extra: Kwargs
    given: CalibrationText
    rounding: Callable[[], float]


def told_by(model: HFModel, texts: Sequence[CalibrationText], goal: Goal) -> list[Told]:
    """The references, made once."""
    wide = cache(partial(in_float64, model, goal))
    found = []
    for each in texts:
        text, extra = each.tokens, each.extra
        logits = _logits(model, text, extra)
        found.append(
            Told(
                text=text,
                logits=logits,
                extra=extra,
                given=each,
                rounding=cache(partial(_rounding, wide, text, extra, logits)),
            )
        )
    return found


def _logits(model: HFModel, text: torch.Tensor, extra: Kwargs) -> torch.Tensor:
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    with evaluating(model), torch.no_grad():
        logits: torch.Tensor = model(**{key: text}, **extra, use_cache=False, return_dict=True).logits
    return logits


def _rounding(
    wide: Callable[[], HFModel | None], text: torch.Tensor, extra: Kwargs, logits: torch.Tensor
) -> float:
    """The relative error of the model's logits against its float64 copy's; 0 where there is none."""
    exact = wide()
    if exact is None:
        return 0.0
    try:
        return relative_error(logits.double(), _logits(exact, text, doubled(extra)).double())
    except Exception:  # dtypes that the model fixes: the plain limit holds
        return 0.0


def checks(stepper: Stepper, model: HFModel, told: Sequence[Told], goal: Goal) -> list[Check]:
    """Relative errors of logits in each regime, the largest over the texts; nats per token in the note."""
    most = max(most_rounding(model), _OF_STATES if stepper.step.layout.states else 0.0)
    limit = goal.tolerance if not goal.exact else _ROUNDING
    found: dict[str, tuple[float, float]] = {}
    for one in told:
        one = encoded(stepper, model, one)
        theirs = 0.0 if goal.exact else _nats(one.logits, one.text)
        for name, sizes in _ways(one.text.shape[1]):
            kinds = one.extra.get(stepper.step.boundary.kinds)
            logits = forced(stepper, model, one, _beside_images(sizes, kinds))
            error = relative_error(logits, one.logits)
            loss = 0.0 if goal.exact else _nats(logits, one.text) - theirs
            limit = max(limit, exact_limit(goal, error, most, one.rounding))
            before = found.get(name, (0.0, 0.0))
            found[name] = (max(error, before[0]), loss if abs(loss) > abs(before[1]) else before[1])
    return [
        Check(name=name, error=error, limit=limit, note=Nats(change=loss) if not goal.exact else None)
        for name, (error, loss) in found.items()
    ]


def encoded(stepper: Stepper, model: HFModel, told: Told) -> Told:
    """With what the lowered encoder makes of its input, or of images, in the place of the model's own."""
    step, source, pictures = stepper.step, told.given.source, told.given.pictures
    if source:
        encoder = LoweredEncoder(step, tuple(source))
        return replace(told, extra={**told.extra, "encoder_outputs": encoder(**source)})
    if not pictures or step.eye is None or step.image is None or told.given.uncut is None:
        return told
    made: Kwargs = {ENCODED: {"image": Eye(model.base_model, step)(pictures)}}
    whole = TextWithImages(told.given.uncut, step.boundary, step.image)
    return replace(told, extra={**told.extra, **whole.part(made, 0, told.text.shape[1])})


def _ways(tokens: int) -> Iterator[tuple[str, list[int]]]:
    """(name, new tokens of each call)."""
    yield "prefill in one call", [tokens]
    one_by_one = min(_DECODED, tokens - 1)
    yield f"prefill, then {one_by_one} tokens one by one", [tokens - one_by_one, *[1] * one_by_one]
    if tokens > 4:
        third = tokens // 3
        yield "prefill in chunks", [third, 1, tokens - 2 * third - 1, third]


def _beside_images(sizes: Sequence[int], kinds: torch.Tensor | None) -> list[int]:
    """New tokens of each call, of which none ends within an image that is read both ways.

    `kinds`: which tokens are images', where the mask depends on it.
    """
    ends = list(itertools.accumulate(sizes))
    ends = ends if kinds is None else between_images(kinds, ends)
    return [end - start for start, end in itertools.pairwise((0, *ends))]


def forced(stepper: Stepper, model: HFModel, told: Told, sizes: Sequence[int]) -> torch.Tensor:
    """Logits of a text that is given in calls of these sizes."""
    cache, at, parts = new_cache(model), 0, []
    for new in sizes:
        names, extra = stepper.step.boundary, told.extra
        given = {names.tokens: told.text[:, at : at + new], names.cache: cache}
        if stepper.step.image is not None:
            extra = TextWithImages(told.text, names, stepper.step.image).part(extra, at, at + new)
        parts.append(stepper(**given, **extra).logits)
        at += new
    return torch.cat(parts, dim=1)


def _nats(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Cross entropy of a text's tokens under these logits, per token."""
    return float(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())
    )
