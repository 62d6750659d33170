"""The words of a mask: `causal ∧ window 64 ∧ padding (attention_mask)`."""

from __future__ import annotations

from collections.abc import Iterator

from effcompile.core.mask import MaskForm, Names


def mask_words(form: MaskForm) -> str:
    """One line for a mask: its terms, each with the inputs that it is read from."""
    return " ∧ ".join([*_band(form), *_conditions(form)]) or "every key"


def condition_words(form: MaskForm) -> str:
    """What the inputs have to be for a mask to be this."""
    return " and ".join(map(str, form.guards))


def _band(form: MaskForm) -> Iterator[str]:
    lo, hi = form.band
    if hi is not None and hi in (0, form.ahead):
        yield "causal" if hi == 0 else "causal (bottom-right)"
        if lo is not None:
            yield f"window {hi - lo + 1}"
    elif lo is not None and hi is not None and lo == -hi:
        yield f"two-sided window ±{hi}"
    elif lo is not None or hi is not None:
        yield f"{'' if lo is None else f'{lo} ≤ '}k − q{'' if hi is None else f' ≤ {hi}'}"


def _conditions(form: MaskForm) -> Iterator[str]:
    if form.chunk:
        yield f"chunks of {form.chunk}"
    if form.q_ids is not None or form.k_ids is not None:
        both = tuple(dict.fromkeys((*(form.q_ids or ()), *(form.k_ids or ()))))
        yield _named("padded queries and keys" if form.flags else "documents", both)
    if form.valid is not None:
        yield _named("padding", form.valid)
    if form.mask is not None:
        yield _named("dense", form.mask)


def _named(word: str, inputs: Names) -> str:
    return f"{word} ({', '.join(inputs)})" if inputs else word
