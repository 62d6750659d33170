"""How much each leaf of a cache changes the logits when it is held narrower.

All keys, and all values, are rounded in a form at once, and the model is run: so much is theirs together.
What of it is a leaf's follows from gradients, as with weights (estimate/sensitivity.py): for v of random
signs over the logits and δ what rounding changes of a leaf, E (vᵀ J δ)² = ‖J δ‖². Rows are rounded
independently of each other, so that their squares add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from effcompile.capture.caches import Kept, cache_keeping, cache_name, new_cache
from effcompile.capture.generation import GenerationStep
from effcompile.capture.mends import evaluating
from effcompile.capture.verify import relative_error
from effcompile.core.types import HFModel, Kwargs, Value
from effcompile.ops.cache_rows import rounded
from effcompile.runtime.generation.images import TextWithImages
from effcompile.search.generation.text import CalibrationText

#: Texts' rows, and tokens of each, that errors are measured on; draws of v.
_ROWS, _TOKENS, _DRAWS = 2, 96, 2
#: The squared error of what rounds and is not seen to: see `_UNSEEN` in estimate/sensitivity.py.
_UNSEEN = 2.0**-48
#: (leaf, dtype) → its part.
Parts = dict[tuple[str, str], float]


def leaf_errors(
    model: HFModel,
    step: GenerationStep,
    texts: Sequence[CalibrationText],
    leaves: Sequence[str],
    dtypes: Sequence[str],
) -> dict[tuple[str, str], float]:
    """(leaf, dtype) → squared relative error of the logits, the largest over the texts."""
    given = [_given(model, step, text) for text in texts]
    totals: Parts = {}
    with evaluating(model), torch.no_grad():
        for one in given:
            told = _logits(model, one, new_cache(model))
            for side, dtype in ((side, dtype) for side in _sides(leaves) for dtype in dtypes):
                cache = cache_keeping(model, _rounding(side, dtype))
                error = relative_error(_logits(model, one, cache), told) ** 2
                totals[side, dtype] = max(totals.get((side, dtype), 0.0), error)
        parts = _parts(model, given[0], leaves, dtypes)
    sums = _sums(parts)
    return {
        (leaf, dtype): max(_UNSEEN, totals[_side(leaf), dtype] * part / sums[_side(leaf), dtype])
        for (leaf, dtype), part in parts.items()
    }


def _side(leaf: str) -> str:
    """`keys` or `values`."""
    return leaf.rpartition(".")[2]


def _sides(leaves: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_side, leaves)))


def _rounding(side: str, dtype: str) -> Kept:
    return lambda leaf, rows: rounded(rows, getattr(torch, dtype)) if _side(leaf) == side else rows


def _parts(model: HFModel, given: Kwargs, leaves: Sequence[str], dtypes: Sequence[str]) -> Parts:
    """Relative to each other; alike where nothing can be differentiated, or nothing is seen."""
    alike: Parts = {(leaf, dtype): 1.0 for leaf in leaves for dtype in dtypes}
    rows: dict[str, torch.Tensor] = {}
    shifts: dict[str, torch.Tensor] = {}

    def shifted(leaf: str, new: torch.Tensor) -> torch.Tensor:
        if leaf not in leaves:
            return new
        rows[leaf], shifts[leaf] = new.detach(), torch.zeros_like(new, requires_grad=True)
        return new + shifts[leaf]

    try:
        with torch.enable_grad():
            logits = _logits(model, given, cache_keeping(model, shifted))
            drawn = [_gradients(logits, shifts, seed) for seed in range(_DRAWS)]
    except (RuntimeError, NotImplementedError):
        return alike
    found: Parts = {}
    for leaf, dtype in alike:
        moved = (rounded(rows[leaf], getattr(torch, dtype)) - rows[leaf]) if leaf in rows else torch.zeros(())
        seen = (each[leaf] for each in drawn if leaf in each)
        found[leaf, dtype] = sum(float((each * moved).sum(-1).square().sum()) for each in seen)
    sums = _sums(found)
    return {
        (leaf, dtype): part if 0 < sums[_side(leaf), dtype] < torch.inf else 1.0
        for (leaf, dtype), part in found.items()
    }


def _sums(parts: Parts) -> Parts:
    """(side, dtype) → those of its leaves together."""
    found: Parts = {}
    for (leaf, dtype), part in parts.items():
        found[_side(leaf), dtype] = found.get((_side(leaf), dtype), 0.0) + part
    return found


def _gradients(
    logits: torch.Tensor, shifts: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """VᵀJ of every leaf that the logits depend on, for one draw of v."""
    signs = torch.randint(0, 2, logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    v = signs.to(logits) * 2 - 1
    made = torch.autograd.grad(logits, [*shifts.values()], v, retain_graph=True, allow_unused=True)
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
