"""How much each leaf of a cache changes the logits when it is held narrower.

The model is run with all keys and values in 8 bits, with all keys in 4 bits, and with all values: so much is
theirs together. What of it is a leaf's, and what rounding to bf16 makes, follows from gradients, as with
weights (estimate/sensitivity.py): for v of random signs over the logits and δ what rounding changes of a
leaf, E (vᵀ J δ)² = ‖J δ‖². Rows are rounded independently of each other, so that their squares add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from effcompile.capture.caches import Kept, cache_keeping, cache_name, new_cache
from effcompile.capture.generation import GenerationStep
from effcompile.capture.mends import evaluating
from effcompile.capture.verify import relative_error
from effcompile.core.types import HFModel, Kwargs, Value
from effcompile.ops.cache_rows import rounded
from effcompile.runtime.generation.images import TextWithImages
from effcompile.search.generation.text import CalibrationText

#: Texts' rows, and tokens of each, that errors are measured on.
_ROWS, _TOKENS = 1, 96
#: The squared error of what rounds and is not seen to: see `_UNSEEN` in estimate/sensitivity.py.
_UNSEEN = 2.0**-48
#: What a leaf may be held in; of that the dtype, and the ends of the names of those that are rounded at once.
_DTYPES = ("bfloat16", "int8", "uint8")
_RUNS = (("int8", ("keys", "values")), ("uint8", ("keys",)), ("uint8", ("values",)))
#: The least part of the largest one that is believed.
_LEAST = 1e-12
#: (leaf, dtype) → its part.
Parts = dict[tuple[str, str], float]


def leaf_errors(
    model: HFModel, step: GenerationStep, texts: Sequence[CalibrationText], leaves: Sequence[str]
) -> dict[tuple[str, str], float]:
    """(leaf, dtype) → squared relative error of the logits, the largest over the texts."""
    given = [_given(model, step, text) for text in texts]
    runs: dict[tuple[str, tuple[str, ...]], float] = {}  # of the leaves whose names end so
    with evaluating(model), torch.no_grad():
        parts, told = _parts(model, given[0], leaves)
        for one in given:
            told = _logits(model, one, new_cache(model)) if one is not given[0] else told
            for dtype, ends in _RUNS:
                found = _logits(model, one, cache_keeping(model, _rounding(dtype, ends)))
                error = relative_error(found, told) ** 2
                runs[dtype, ends] = max(runs.get((dtype, ends), 0.0), error)
    scales = {
        (leaf, dtype): error / sum(parts[each, dtype] for each in leaves if each.endswith(ends))
        for (dtype, ends), error in runs.items()
        for leaf in leaves
        if leaf.endswith(ends)
    }
    return {
        (leaf, dtype): max(_UNSEEN, part * scales.get((leaf, dtype), scales[leaf, "int8"]))
        for (leaf, dtype), part in parts.items()
    }


def _rounding(dtype: str, ends: tuple[str, ...]) -> Kept:
    return lambda leaf, rows: _rounded(rows, dtype) if leaf.endswith(ends) else rows


def _rounded(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """As a leaf of that dtype holds rows: pairs of what is not even are not made."""
    even = dtype != "uint8" or rows.shape[-1] % 2 == 0
    return rounded(rows, getattr(torch, dtype)) if even else rows


def _parts(model: HFModel, given: Kwargs, leaves: Sequence[str]) -> tuple[Parts, torch.Tensor]:
    """Relative to each other, alike where nothing can be differentiated or seen; and the logits."""
    alike: Parts = {(leaf, dtype): 1.0 for leaf in leaves for dtype in _DTYPES}
    rows: dict[str, torch.Tensor] = {}
    shifts: dict[str, torch.Tensor] = {}

    def shifted(leaf: str, new: torch.Tensor) -> torch.Tensor:
        rows[leaf], shifts[leaf] = new.detach(), torch.zeros_like(new, requires_grad=True)
        return new + shifts[leaf]

    try:
        with torch.enable_grad():
            logits = _logits(model, given, cache_keeping(model, shifted))
            gradients = _gradients(logits, shifts)
    except (RuntimeError, NotImplementedError):
        return alike, _logits(model, given, new_cache(model))
    logits, found = logits.detach(), Parts()
    for leaf, dtype in alike:
        if leaf not in gradients:
            return alike, logits
        moved = gradients[leaf] * (_rounded(rows[leaf], dtype) - rows[leaf])
        found[leaf, dtype] = float(moved.sum(-1).square().sum())
    least = _LEAST * max(found.values())
    seen = 0 < least < torch.inf
    return ({key: max(part, least) for key, part in found.items()} if seen else alike), logits


def _gradients(logits: torch.Tensor, shifts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """VᵀJ of every leaf that the logits depend on."""
    signs = torch.randint(0, 2, logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    v = signs.to(logits).mul_(2).sub_(1)
    made = torch.autograd.grad(logits, [*shifts.values()], v, allow_unused=True)
    return {leaf: each for leaf, each in zip(shifts, made, strict=True) if each is not None}


def _given(model: HFModel, step: GenerationStep, text: CalibrationText) -> Kwargs:
    """A text's first rows and tokens, with what goes with them."""
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    tokens = text.tokens[:_ROWS, :_TOKENS]
    if step.image is None:
        return {key: tokens, **{name: _first(value) for name, value in text.extra.items()}}
    shown = TextWithImages(text.tokens, step.boundary, step.image)
    return {key: tokens, **shown.part(text.extra, 0, _TOKENS, _ROWS)}


def _first(value: Value) -> Value:
    """The first rows of an encoder's output, or of its mask."""
    if isinstance(value, torch.Tensor):
        return value[:_ROWS]
    return type(value)(last_hidden_state=value.last_hidden_state[:_ROWS])


def _logits(model: HFModel, given: Kwargs, cache: object) -> torch.Tensor:
    given = {**given, cache_name(model): cache}
    logits: torch.Tensor = model(**given, use_cache=True, return_dict=True).logits
    return logits
