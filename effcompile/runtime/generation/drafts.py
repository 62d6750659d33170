"""Drafts that a plan decided on, asked of Hugging Face's generate() where they leave the text as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from effcompile.capture.caches import CACHE_NAMES
from effcompile.core.errors import GuardError
from effcompile.core.types import HFConfig, Kwargs

#: Arguments of generate() that say how to speculate, that only what runs without drafts takes, or that are
#: asked at every token: criteria that stop and processors that count would see several at once.
_SAYS = (
    "prompt_lookup_num_tokens",
    "assistant_model",
    "custom_generate",
    *CACHE_NAMES,
    "inputs_embeds",
    "negative_prompt_ids",
    "stopping_criteria",
    "logits_processor",
)


def with_drafts(drafts: int, config: HFConfig, args: Sequence[object], kwargs: Mapping[str, Any]) -> Kwargs:
    """The keyword arguments of a call of generate(), with so many drafts a step where it is greedy, of one
    row and with a growing cache, and says nothing of it itself.

    `config`: what generate() goes by where the call says nothing.

    Raises:
        GuardError: drafts by the model's first layers, as which generate() marks the model for a while.
    """
    given = dict(kwargs)
    said = given.get("generation_config") or config
    if given.get("assistant_early_exit") or getattr(said, "assistant_early_exit", None):
        raise GuardError(
            "assistant_early_exit drafts by the model's first layers alone, and a planned step runs all of "
            "them. Leave it out; assistant_model, prompt_lookup_num_tokens or a plan with `--pass speculate` "
            "draft here.",
            place="inputs['assistant_early_exit']",
        )
    row = next(
        (value for value in (*args[:1], given.get("input_ids"), given.get("inputs")) if value is not None),
        None,
    )
    one = isinstance(row, torch.Tensor) and row.dim() == 2 and row.shape[0] == 1
    if not drafts or not one or any(given.get(name) is not None for name in _SAYS):
        return given
    asked = copy.deepcopy(given.get("generation_config") or config)
    asked.update(**{name: value for name, value in given.items() if hasattr(asked, name)})
    plain = asked.get_generation_mode() == GenerationMode.GREEDY_SEARCH and asked.use_cache is not False
    unusual = (asked.cache_implementation, asked.stop_strings, asked.max_time)
    if not plain or asked.num_return_sequences not in (None, 1) or any(each is not None for each in unusual):
        return given
    return {**given, "prompt_lookup_num_tokens": drafts}
