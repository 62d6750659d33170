"""The JSON of the OpenAI completions protocol: what is asked, what is answered, and errors.

Source: the API reference of OpenAI, "Completions" (legacy): fields, their ranges, objects of a stream and the
shape of an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from effcompile.core.errors import UnknownNameError, UsageError, clipped
from effcompile.core.json_keys import repeated_key
from effcompile.serving.desk import Wish

#: What a field may be and still change nothing; other values are refused, for nothing here does what they ask
#: for.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (None,), "presence_penalty": (0, None), "frequency_penalty": (0, None),
    "logit_bias": (None, {}), "best_of": (None, 1), "suffix": (None, ""), "echo": (False, None),
}  # fmt: skip
#: Fields of OpenAI's APIs that say who asks, and nothing about the answer.
_IGNORED = frozenset({"user", "safety_identifier", "metadata", "prompt_cache_key"})
#: How other servers and libraries call what is served.
_OTHERWISE: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "stop_sequences": "stop", "messages": "prompt", "input": "prompt", "num_return_sequences": "n",
}  # fmt: skip
_MOST_STOPS, _MOST_CHOICES = 4, 16


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a stream is told."""

    include_usage: bool | None = False


class CompletionBody(msgspec.Struct, kw_only=True):
    """The body of a request. Fields that are not here are refused but for `_IGNORED` and those that are null:
    an answer that leaves out what was asked for is another one.
    """

    prompt: str | list[Any]
    model: str = ""
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    n: int | None = 1
    stream: bool | None = False
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    suffix: str | None = None
    echo: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def counts(self) -> bool:
        """Whether a stream ends with how many tokens there were."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        """Texts that end it."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))


def read(body: bytes) -> CompletionBody:
    """What a body asks for.

    Raises:
        UsageError: no such JSON, or a value out of its range.
    """
    try:
        asked = msgspec.json.decode(body, type=CompletionBody)
        given = msgspec.json.decode(body, type=dict[str, Any])
        repeated = repeated_key(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"The body is no completion request: {error}.") from error
    if repeated is not None:
        raise UsageError(f"The body says {clipped(repr(repeated))} twice in one object. Say it once.")
    fields = CompletionBody.__struct_fields__
    for name, value in given.items():
        if value is not None and name not in fields and name not in _IGNORED:
            served = [each for each in fields if each not in _NEUTRAL]
            raise UnknownNameError("field that is served", name, served, _OTHERWISE)
    if asked.counts and not asked.stream:
        raise UsageError("stream_options are of a stream, and stream is not true. Leave them out.")
    for name, allowed in _NEUTRAL.items():
        if getattr(asked, name) not in allowed:
            raise UsageError(f"{name} = {getattr(asked, name)!r} is not served. Leave it out.")
    ranges = {
        "temperature": (asked.temperature, 0.0, 2.0), "top_p": (asked.top_p, 1e-6, 1.0),
        "n": (asked.n, 1, _MOST_CHOICES), "stop": (len(asked.stops()), 0, _MOST_STOPS),
        "seed": (asked.seed, -(2**63), 2**63 - 1),
    }  # fmt: skip
    for name, (value, least, most) in ranges.items():
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} = {value} is not between {least} and {most}.")
    return asked


def wishes(asked: CompletionBody, encode: Callable[[str], list[int]], stops: frozenset[int]) -> list[Wish]:
    """The requests of it: `n` of each prompt.

    Raises:
        UsageError: a prompt that is neither text nor token ids.
    """
    given = asked.prompt
    several = isinstance(given, list) and bool(given) and not all(type(each) is int for each in given)
    made = []
    for prompt in given if several else [given]:
        if isinstance(prompt, str):
            ids = encode(prompt)
        elif isinstance(prompt, list) and all(type(each) is int for each in prompt):
            ids = prompt
        else:
            raise UsageError("prompt is neither a text, a list of texts, token ids nor a list of these.")
        made += [
            Wish(
                prompt=tuple(ids),
                most=16 if asked.max_tokens is None else asked.max_tokens,
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                seed=None if asked.seed is None else (asked.seed + choice) % 2**63,
                stops=stops,
            )
            for choice in range(asked.n or 1)
        ]
    return made


def choice(index: int, text: str, ended: str | None) -> dict[str, Any]:
    """One of the choices of an answer, or of a piece of a stream. `ended`: "stop", "length" or None."""
    return {"text": text, "index": index, "logprobs": None, "finish_reason": ended}


def answer(
    name: str, model: str, choices: Sequence[Mapping[str, Any]], tokens: tuple[int, int] | None = None
) -> bytes:
    """A completion or a piece of one. `tokens`: of the prompts, and new ones."""
    made: dict[str, Any] = {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
    }
    if tokens is not None:
        made["usage"] = {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[1],
            "total_tokens": sum(tokens),
        }
    return msgspec.json.encode(made)


def error(said: str, kind: str) -> bytes:
    """An error as clients of the protocol read it.

    `kind`: "invalid_request_error", "overloaded_error", "server_error".
    """
    return msgspec.json.encode({"error": {"message": said, "type": kind, "param": None, "code": None}})


def models(name: str, created: int) -> bytes:
    """The list of models: one."""
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": created, "owned_by": "effcompile"}],
        }
    )
