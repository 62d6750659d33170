"""How a cache is held, as one choice of the solve: as the model has it, in bf16, or in 8 bits with a scale
for each row.

A narrower cache leaves memory to the weights and is read faster; its error counts with that of the weights.
It is offered where the cache grows in place, and nothing but attentions of ours reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from effcompile.backends.torch.in_place import appending
from effcompile.capture.caches import cache_name, new_cache, rounding_cache
from effcompile.capture.generation import GenerationStep
from effcompile.capture.mends import evaluating
from effcompile.capture.verify import relative_error
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import LoweringError
from effcompile.core.goal import Goal
from effcompile.core.types import HFModel, Kwargs, Value
from effcompile.ir.cache import CacheLayout
from effcompile.ir.formats import BF16, FP32, TABLE_INT8_ROWS, Form
from effcompile.ir.plan import Plan
from effcompile.machine.target import Target
from effcompile.ops.cache_rows import rounded
from effcompile.passes import Choice, Option
from effcompile.runtime.generation.images import TextWithImages
from effcompile.search.generation.text import CalibrationText

#: The site.
CACHE = "cache"
#: What a row may be held in → its form; the dtypes are those of `CacheLayout.narrowed`.
FORMS: Mapping[str, Form] = {
    "": Form(weights=FP32),
    "bfloat16": Form(weights=BF16),
    "int8": Form(weights=TABLE_INT8_ROWS),
}
#: Texts and tokens of each that errors are measured on.
_ROWS, _TOKENS = 2, 96


def dtype_in(plan: Plan) -> str:
    """What a plan holds the cache in; "" as the model has it."""
    form = plan.forms().get(CACHE)
    return next((dtype for dtype, each in FORMS.items() if each == form), "")


def form_of(layout: CacheLayout) -> Form:
    """How the rows of a layout are held."""
    return FORMS[layout.narrow]


def cache_choice(
    step: GenerationStep,
    model: HFModel,
    goal: Goal,
    target: Target,
    texts: Sequence[CalibrationText],
) -> tuple[Choice, ...]:
    """The choice; none where there is nothing to choose."""
    if goal.exact or not _narrows(step):
        return ()
    context, prompt, new = goal.tokens
    middle, batch = min(context, prompt + new // 2), goal.batch
    errors, options = _errors(model, step, texts), list[Option]()
    for dtype, form in FORMS.items():
        layout = step.layout.narrowed(dtype)
        saved = (
            new * (step.layout.nbytes(middle, batch) - layout.nbytes(middle, batch)) / target.memory_bandwidth
        )
        kept, error = layout.nbytes(context, batch), errors.get(dtype, 0.0)
        cost = Cost(
            seconds=-saved, bytes_kept=kept, bytes_transient=_widened(layout, context, batch),
            error_squared=error**2, provenance=Provenance.MODELLED,
        )  # fmt: skip
        options.append(Option(form=form, cost=cost, by=CACHE))
    return (Choice(site=CACHE, kind=CACHE, baseline=FORMS[""].name, options=tuple(options)),)


def _widened(layout: CacheLayout, context: int, batch: int) -> int:
    """Bytes of one head's keys and values in 32 bits, as an attention of many queries takes them; those of 8
    bits before and after they are scaled.
    """
    rows = [4 * batch * leaf.rows(context) * leaf.shape[-1] for leaf in layout if leaf.held]
    return max(rows, default=0) * (3 if layout.narrow == "int8" else 2)


def _narrows(step: GenerationStep) -> bool:
    """Whether its rows may be held narrower."""
    layout = step.layout.narrowed("bfloat16")
    places = [at for at, spec in enumerate(step.program.inputs) if spec.name.startswith("past")]
    narrow = [places[at] for at in layout.written if layout.leaves[at].held]
    try:
        appending(step.program.module, dict.fromkeys(narrow, 0), narrow)
    except LoweringError:
        return False
    return bool(narrow)


def _errors(model: HFModel, step: GenerationStep, texts: Sequence[CalibrationText]) -> dict[str, float]:
    """dtype → relative error of the logits of a text whose keys and values are rounded so; the largest over
    the texts.
    """
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    found: dict[str, float] = {}
    with evaluating(model), torch.no_grad():
        for text in texts:
            given = {key: text.tokens[:_ROWS, :_TOKENS]}
            if step.image is None:
                given |= {name: _first(value) for name, value in text.extra.items()}
            else:
                shown = TextWithImages(text.tokens, step.boundary, step.image)
                given |= shown.part(text.extra, 0, _TOKENS, _ROWS)
            told = _logits(model, given, new_cache(model))
            for dtype in filter(None, FORMS):
                cache = rounding_cache(model, partial(rounded, dtype=getattr(torch, dtype)))
                found[dtype] = max(found.get(dtype, 0.0), relative_error(_logits(model, given, cache), told))
    return found


def _first(value: Value) -> Value:
    """The first rows of an encoder's output, or of its mask."""
    if isinstance(value, torch.Tensor):
        return value[:_ROWS]
    return type(value)(last_hidden_state=value.last_hidden_state[:_ROWS])


def _logits(model: HFModel, given: Kwargs, cache: Any) -> torch.Tensor:
    given = {**given, cache_name(model): cache}
    logits: torch.Tensor = model(**given, use_cache=True, return_dict=True).logits
    return logits
