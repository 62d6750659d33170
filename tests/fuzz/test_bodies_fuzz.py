"""Hostile requests to `effcompile serve`: whatever the body, the answer is one of the protocol's, and the
next client has its own tokens.

The application is called as a server calls it (ASGI), so that a client may go away at any message.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fuzz_settings import fuzzed
from generation_models import bare, captured, ids
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("starlette")
from effcompile.runtime.generation.rows import SharedRows
from effcompile.serving.app import Service, application
from effcompile.serving.desk import Desk

CONTEXT, PLACES = 64, 2
FIELDS = [
    "prompt",
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stop",
    "seed",
    "logprobs",
    "presence_penalty",
]
FIELDS += ["frequency_penalty", "logit_bias", "best_of", "suffix", "echo", "user", "", "__class__"]

numbers = st.integers() | st.sampled_from(
    [2**31, 2**63, -(2**63), 10**30, 10**400, 1e300, 1e-320, -0.0, 0.5, 1e-9]
)
texts = st.text(max_size=12) | st.sampled_from(["w5 w9", "\x00", "\u202e", "x" * 5000, "tiny", "w5 " * 70])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
)
#: What some of the fields may be, so that most bodies get as far as the model.
SENSIBLE: dict[str, Any] = {
    "prompt": st.sampled_from(["w5 w9 w11", [5, 9, 11], ["w5", "w9 w3"], [[5], [9, 11]], "w5 " * 40]),
    "max_tokens": st.integers(1, 20), "temperature": st.sampled_from([0, 0.7, 2, 1e-320, 1e-300]),
    "top_p": st.sampled_from([1, 0.5, 1e-6]), "n": st.integers(1, 3), "stream": st.booleans(),
    "stop": st.sampled_from(["w7", ["w1", "w2"], "", []]), "seed": st.integers(-(2**63), 2**63 - 1),
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Fields that are right or anything, and then the text as it is, cut off, or with something
    put into it.
    """
    asked = {
        name: draw(values if draw(st.integers(0, 5)) == 0 else SENSIBLE[name])
        for name in SENSIBLE
        if draw(st.integers(0, 2))
    }
    asked |= (
        draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=2))
        if draw(st.integers(0, 3)) == 0
        else {}
    )
    asked.setdefault("prompt", [5, 9])
    text = json.dumps(asked).encode()
    at = draw(st.integers(0, len(text)))
    more = [
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b"9" * 5_000,
        b"1e999999",
        b"NaN",
        b"\xff\xfe",
        b"\x00",
        b'"',
        b"\\ud800",
        b"\\u0000",
    ]
    change = draw(st.integers(0, 8))
    return (
        text[:at]
        if change == 0
        else text[:at] + draw(st.sampled_from(more)) + text[at:]
        if change == 1
        else text
    )


@dataclass
class Client:
    """A client as an ASGI application sees it.

    `patience`: messages that it sends and takes before it goes away; None: all.
    """

    body: bytes
    patience: int | None = None
    status: int = 0
    said: bytes = b""
    _sent: int = 0
    _taken: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    def _tired(self) -> bool:
        return self.patience is not None and self._sent + self._taken >= self.patience

    async def receive(self) -> dict[str, Any]:
        if not self._tired() and self._sent < 2:
            half = len(self.body) // 2
            part = self.body[:half] if self._sent == 0 else self.body[half:]
            self._sent += 1
            return {"type": "http.request", "body": part, "more_body": self._sent < 2}
        if not self._tired():
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self._taken += 1
        if self._tired():
            self._gone.set()
        self.status = message.get("status", self.status)
        self.said += message.get("body", b"")

    async def call(self, app: Any) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "headers": [], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await asyncio.wait_for(app(scope, self.receive, self.send), 60)


class Words:
    """As a tokenizer is called: w5 is token 5, another word is token 0.

    Half a character is refused, as tokenizers do.
    """

    def __call__(self, text: str) -> dict[str, list[int]]:
        text.encode()
        return {
            "input_ids": [int(w[1:]) if w[1:].isdecimal() and int(w[1:]) < 64 else 0 for w in text.split()]
        }

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[nn.Module, Any]]:
    model, planned = bare(captured("llama", num_hidden_layers=1), context=CONTEXT)
    desk = Desk(SharedRows(planned.stepper), 64, places=PLACES, queue=8, prompts=2)
    yield model, application(Service(desk=desk, words=Words(), stops=frozenset(), name="tiny", made=0))
    desk.close()


@pytest.fixture(scope="module")
def wanted(served: tuple[nn.Module, Any]) -> str:
    prompt = ids(5).tolist()
    made = served[0].generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    return " ".join(f"w{token}" for token in made[0, 5:].tolist())


@fuzzed(60)
@given(body=bodies(), patience=st.none() | st.integers(0, 8))
def test_any_body_is_answered_in_words(
    served: tuple[nn.Module, Any], wanted: str, body: bytes, patience: int | None, tally: Counter[str]
) -> None:
    sane = json.dumps({"prompt": ids(5).tolist(), "max_tokens": 4, "temperature": 0}).encode()

    async def together() -> tuple[Client, Client]:
        hostile, other = Client(body, patience), Client(sane)
        await asyncio.gather(hostile.call(served[1]), other.call(served[1]))
        while other.status == 429:  # the queue was full of the hostile one's
            await asyncio.sleep(0.01)
            other = Client(sane)
            await other.call(served[1])
        return hostile, other

    hostile, other = asyncio.run(together())
    assert other.status == 200 and json.loads(other.said)["choices"][0]["text"].strip() == wanted
    gone = patience is not None
    assert hostile.status in (200, 400, 404, 429, 499) or (gone and hostile.status == 0)
    if hostile.status in (400, 404, 429):
        assert len(json.loads(hostile.said)["error"]["message"]) > 10
    if hostile.status == 200 and not gone:
        assert b"finish_reason" in hostile.said and b"server_error" not in hostile.said
    tally[f"bodies: {'the client went away, ' * gone}{hostile.status}"] += 1
