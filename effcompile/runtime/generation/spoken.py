"""Text in, text out: a saved generation with its tokenizer, or with its processor where there are images, and
the rates at which it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from effcompile.core.errors import UsageError
from effcompile.core.stages import first_line
from effcompile.core.trust import refuse_own_code
from effcompile.runtime.generation.executable import open_generation
from effcompile.runtime.generation.pictures import processor_in, with_pictures

#: Says a piece of text; `nl` is False, as typer.echo has it.
Say = Callable[..., object]
#: Text and rates, by name.
Told = dict[str, Any]


class Spoken(Protocol):
    """Goes on from a prompt: the most new tokens, how many of them are drafted at a time, who is told the
    text, and files of images; returns text and rates.
    """

    def __call__(
        self, prompt: str, new: int | None, drafts: int, say: Say | None, images: Sequence[Path] = ()
    ) -> Told: ...


def speak(directory: Path, tokenizer: Path) -> Spoken:
    """What a folder says.

    Drafts are what followed the last tokens where they stood before (prompt look-up); a step checks all of
    them, so that the text is the same.

    Raises:
        UsageError: no tokenizer there. FormatError: a folder that is none of ours.
    """
    words = tokenizer_in(tokenizer)  # which fails sooner
    opened = open_generation(directory)

    def spoken(
        prompt: str, new: int | None, drafts: int, say: Say | None, images: Sequence[Path] = ()
    ) -> Told:
        if images and opened.lowered.image is None:
            raise UsageError(f"{opened.plan.model} takes no images. Leave them out.")
        given = (
            with_pictures(processor_in(tokenizer), prompt, images)
            if images
            else {"input_ids": words(prompt, return_tensors="pt")["input_ids"]}
        )
        given = {name: value.to(opened.lowered.device) for name, value in given.items()}
        ids = given["input_ids"]
        room = opened.lowered.room.context - (0 if opened.config.is_encoder_decoder else ids.shape[1])
        if not ids.shape[1]:
            raise UsageError("The prompt has no tokens. Give a text.")
        if room < 1:
            raise UsageError(
                f"The prompt has {ids.shape[1]} tokens, and the plan has room for context = "
                f"{opened.lowered.room.context}, prompt and new ones. Give a shorter prompt, or plan again "
                "with a longer context."
            )
        clock = _Clock(words, say)
        how = {"prompt_lookup_num_tokens": drafts} if drafts else {}
        found = opened.generate(
            **given, max_new_tokens=min(new or room, room), streamer=clock, do_sample=False, **how
        )
        return {
            "text": words.decode(found[0], skip_special_tokens=True),
            "prompt_tokens": ids.shape[1],
            **clock.rates(ids.shape[1]),
        }

    return spoken


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer that stands in a folder.

    Raises:
        UsageError: there is none, or it is code of the folder's own.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the many tokenizers raise
        refuse_own_code(folder, "tokenizer", error)
        raise UsageError(
            f"transformers makes no tokenizer of {str(folder)!r}: {first_line(error)}. Give the folder of "
            "the model that has a whole one: --tokenizer DIR."
        ) from error


class _Clock(BaseStreamer):
    """Says each new piece of text, and keeps the time of every token."""

    def __init__(self, words: Any, say: Say | None) -> None:
        self._words, self._say = words, say
        self._ids: list[int] = []
        self._said, self._times, self._started = "", list[float](), perf_counter()
        self._given = self._at_first = 0

    def put(self, value: torch.Tensor) -> None:
        """A prompt, or a token."""
        prompt = not self._times and not self._ids and value.dim() > 1
        self._ids += value.flatten().tolist()
        if prompt:  # of an encoder-decoder the token that a text begins with
            self._given, self._started = len(self._ids), perf_counter()
        else:
            self._times.append(perf_counter())
            self._at_first = self._at_first or len(self._ids)
        text = self._words.decode(self._ids, skip_special_tokens=True)
        if self._say is not None and not text.endswith("\ufffd"):  # half of a character of several bytes
            self._say(text[len(self._said) :], nl=False)
            self._said = text

    def end(self) -> None:
        """Nothing is held back."""

    def rates(self, prompt: int) -> Told:
        """Tokens a second of the prompt, and of the new ones after the first step; and how many a
        step made.
        """
        new = len(self._ids) - self._given
        first, later = self._times[0] - self._started, self._times[-1] - self._times[0]
        decode = (len(self._ids) - self._at_first) / later if later > 0 else 0.0
        return {
            "new_tokens": new,
            "tokens_per_step": new / len(self._times),
            "prefill_tokens_per_second": prompt / first if first > 0 else 0.0,
            "decode_tokens_per_second": decode,
        }
