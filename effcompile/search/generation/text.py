"""Tokens to measure errors on: the user's, or text that the model itself writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from effcompile.capture.caches import cache_name
from effcompile.core.errors import InputsError
from effcompile.core.types import Args, HFModel, Inputs, Kwargs
from effcompile.ir.cache import CacheLayout, Growth
from effcompile.ops.few_rows import ByFewRows

#: Rows and tokens of text that the model writes: enough to price options with, little to wait for.
_ROWS, _TOKENS = 4, 48
#: Of them those of each row that errors of options are measured on: rows are draws of their own, and
#: twice as many tokens take twice as long. What was decided is compared on all.
_SENSED = 24
_USERS = "the user's"


def calibration_text(
    model: HFModel, given: Sequence[Inputs] | None, context: int
) -> tuple[list[torch.Tensor], str]:
    """Token ids, one tensor (rows, tokens) for each input, and where they are from.

    Raises:
        InputsError: an input of the user's without token ids, or with fewer than two of a row.
    """
    if given:
        texts = [_tokens_of(args, kwargs, at)[:, :context] for at, (args, kwargs) in enumerate(given)]
        return texts, f"{_USERS}: {sum(text.numel() for text in texts)} tokens"
    tokens = min(_TOKENS, context)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if model.config.is_encoder_decoder:
        drawn = torch.randint(
            min(3, vocabulary - 1), vocabulary, (_ROWS, tokens), generator=torch.Generator().manual_seed(0)
        )
        return [drawn.to(model.device)], f"{_ROWS} rows of {min(tokens, _SENSED)} random tokens (seed 0)"
    return [
        _written(model, tokens, vocabulary)
    ], f"{_ROWS} rows of {min(tokens, _SENSED)} tokens that the model itself writes (sampled, seed 0)"


def sensed(texts: Sequence[torch.Tensor], said: str) -> list[torch.Tensor]:
    """What options' errors are measured on, of texts and what is said of them: of those that are not the
    user's the beginnings.
    """
    return [*texts] if said.startswith(_USERS) else [text[:, :_SENSED] for text in texts]


def _tokens_of(args: Args, kwargs: Kwargs, at: int) -> torch.Tensor:
    found = next(
        (kwargs[name] for name in ("input_ids", "decoder_input_ids") if name in kwargs),
        args[0] if args else None,
    )
    if (
        not isinstance(found, torch.Tensor)
        or found.dim() != 2
        or found.is_floating_point()
        or found.shape[1] < 2
    ):
        raise InputsError(
            f"calibration[{at}] has no input_ids of (rows, tokens), at least two tokens of a row. Give "
            f"{{'input_ids': ids}}."
        )
    return found


def _written(model: HFModel, tokens: int, vocabulary: int) -> torch.Tensor:
    """Sampled from the model, one token after the other, beginning with random ones."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), ByFewRows():
        torch.manual_seed(0)
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, (_ROWS, 1), device=model.device)
        cache, name = None, cache_name(model)
        step = ids
        while ids.shape[1] < tokens:
            outputs = model(input_ids=step, **{name: cache}, use_cache=True, return_dict=True)
            cache = outputs[name]
            step = torch.multinomial(outputs.logits[:, -1].float().softmax(-1), 1)
            ids = torch.cat([ids, step], dim=1)
    return ids


def as_inputs(text: torch.Tensor, layout: CacheLayout, like: Kwargs) -> Inputs:
    """A text as the inputs of a step of this layout, all its tokens new, an empty cache; what an encoder
    gives is that of `like`.
    """
    rows, tokens = text.shape
    given: dict[str, Any] = {
        "tokens": text.contiguous(),
        "mask": torch.ones_like(text),
        "positions": torch.arange(tokens, device=text.device).expand(rows, tokens).contiguous(),
        "rows": torch.arange(tokens, device=text.device),
        "past": [
            leaf[:1].expand(rows, -1, -1, -1).contiguous()
            if what.growth is Growth.SOURCE
            else leaf.new_zeros((rows, *leaf.shape[1:]))
            if what.growth is Growth.STATE
            else leaf.new_empty((rows, leaf.shape[1], 0, leaf.shape[3]))
            for leaf, what in zip(like["past"], layout, strict=True)
        ],
    }
    if "source_mask" in like:
        given["source_mask"] = like["source_mask"][:1].expand(rows, -1).contiguous()
    return (), {name: given[name] for name in like}
