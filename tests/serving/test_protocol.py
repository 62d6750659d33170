"""What bodies are taken and refused; the oracle is the API reference's list of fields."""

import json
from typing import Any

import pytest

from effcompile.core.errors import UsageError
from effcompile.serving import protocol


def wishes(**fields: Any) -> list[Any]:
    asked = protocol.read(json.dumps({"prompt": "ab", **fields}).encode())
    return protocol.wishes(asked, lambda text: [ord(letter) for letter in text], frozenset([7]))


def test_defaults_are_those_of_the_reference() -> None:
    (wish,) = wishes(model="m", user="somebody")
    assert (wish.prompt, wish.most, wish.temperature, wish.top_p, wish.seed, wish.stops) == (
        (97, 98),
        16,
        1.0,
        1.0,
        None,
        {7},
    )


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        ([], [()]),
    ],
)
def test_prompts_of_all_four_kinds(prompt: Any, ids: list[tuple[int, ...]]) -> None:
    assert [wish.prompt for wish in wishes(prompt=prompt)] == ids


def test_who_asks_changes_nothing() -> None:
    assert wishes(user="u", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k") == wishes()
    assert wishes(top_k=None, stream_options=None) == wishes()  # of clients that send all their fields


def test_choices_draw_from_seeds_of_their_own() -> None:
    assert [wish.seed for wish in wishes(n=3, seed=5, prompt=["a", "b"])] == [5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "no completion request"),
        ("[]", "no completion request"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        ('{"prompt": ' + "[" * 100_000, "no completion request"),
        ('{"prompt": "\\ud800"}', "no completion request"),
        ('{"prompt": 5}', r"\$\.prompt"),
        ("{}", "prompt"),
        ('{"prompt": "a", "max_tokens": "4"}', r"\$\.max_tokens"),
        ('{"prompt": "a", "temperature": -1}', "temperature = -1"),
        ('{"prompt": "a", "temperature": 3}', "between 0.0 and 2.0"),
        ('{"prompt": "a", "top_p": 0}', "top_p"),
        ('{"prompt": "a", "n": 1000}', "n = 1000"),
        ('{"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}', "stop = 5"),
        ('{"prompt": "a", "logprobs": 3}', "logprobs = 3 is not served"),
        ('{"prompt": "a", "echo": true}', "echo = True is not served"),
        ('{"prompt": "a", "presence_penalty": 0.5}', "presence_penalty"),
        ('{"prompt": "a", "logprobs": 0}', "logprobs = 0 is not served"),  # the chosen tokens' own
        ('{"prompt": "a", "top_k": 5}', "No field that is served is named 'top_k'. Did you mean 'top_p'"),
        ('{"prompt": "a", "repetition_penalty": 2}', "'repetition_penalty'.* Known: max_tokens, model, n, "),
        ('{"prompt": "a", "max_new_tokens": 5}', "Did you mean 'max_tokens'"),
        ('{"prompt": "a", "min_tokens": 0}', "'min_tokens'"),
        ('{"prompt": "a", "messages": []}', "Did you mean 'prompt'"),
        ('{"prompt": "a", "' + "x" * 9999 + '": 1}', "No field that is served"),
        ('{"prompt": "a", "stream_options": {"include_usage": true}}', "stream is not true"),
        ('{"prompt": "a", "stream": true, "stream_options": {"x": 1}}', "x"),
        ('{"prompt": ["a", 5]}', "neither a text"),
        ('{"prompt": [true]}', "neither a text"),
    ],
)
def test_what_is_not_served_is_refused_in_words(body: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        protocol.wishes(protocol.read(body.encode()), lambda text: [5], frozenset())
