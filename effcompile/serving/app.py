"""The routes: POST /v1/completions, GET /v1/models, GET /health.

An ASGI application for uvicorn, or for any other server.

The tokenizer is used by the event loop's thread alone (tokenizers are not safe to share), the model by the
desk's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from effcompile.core.errors import UsageError, clipped
from effcompile.runtime.generation.executable import open_generation
from effcompile.runtime.generation.rows import SharedRows
from effcompile.runtime.generation.spoken import tokenizer_in
from effcompile.serving import protocol
from effcompile.serving.desk import BusyError, Desk, End, Ticket
from effcompile.serving.text import Text

#: Bytes of a request's body.
_MOST_BODY = 1 << 20

#: Why a request that a client waits for has no answer: its status, and words.
_BROKEN: dict[str | None, tuple[int, str]] = {
    "failed": (500, "The model failed at this request."), "cancelled": (503, "The server is stopping."),
}  # fmt: skip

#: (which of a request's choices, a token or None, why it ended or None)
Event = tuple[int, int | None, End | None]


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes need. `name`: the model's, as clients may give it."""

    desk: Desk
    words: Any  # a tokenizer of transformers
    stops: frozenset[int]
    name: str
    made: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.words(text)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        text: str = self.words.decode(ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True, kw_only=True)
class Answering:
    """Requests that were taken, and their texts as tokens come. `choices`: of each prompt."""

    tickets: list[Ticket]
    choices: int
    texts: list[Text]
    events: asyncio.Queue[Event]

    async def pieces(self) -> AsyncIterator[tuple[int, str, End | None]]:
        """(choice, text that is new, why it ended), until all have ended.

        What nobody reads on is cancelled.
        """
        running = set(range(len(self.tickets)))
        try:
            while running:
                at, token, ended = await self.events.get()
                if at not in running:
                    continue
                piece = self.texts[at].put(token) if token is not None else self.texts[at].rest()
                if self.texts[at].stopped:
                    self.tickets[at].cancel()
                    ended = "stop"
                if ended is not None:
                    running.discard(at)
                if piece or ended is not None:
                    yield at, piece, ended
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits for them any longer."""
        for ticket in self.tickets:
            ticket.cancel()

    def tokens(self) -> tuple[int, int]:
        """Of the prompts, each once, and new ones."""
        prompts = sum(len(ticket.wish.prompt) for ticket in self.tickets[:: self.choices])
        return prompts, sum(len(ticket.given) for ticket in self.tickets)


def opened(directory: Path, tokenizer: Path, *, queue: int, prompts: int) -> Service:
    """A saved generation with its tokenizer.

    As many requests are computed at once as its plan has rows (`batch`).

    Raises:
        UsageError: no tokenizer there, or a model whose rows cannot share a batch. FormatError: a folder that
            is none of ours.
    """
    words = tokenizer_in(tokenizer)  # which fails sooner
    model = open_generation(directory)
    ends = model.generation_config.eos_token_id
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    stops = frozenset([ends] if isinstance(ends, int) else ends or ())
    if outside := sorted(token for token in stops if not 0 <= token < vocabulary):
        raise UsageError(
            f"The model's generation config stops at token {outside[0]}, and there are {vocabulary}. Mend "
            "its eos_token_id."
        )
    desk = Desk(
        SharedRows(model.stepper), vocabulary, places=model.plan.goal.batch, queue=queue, prompts=prompts
    )
    return Service(desk=desk, words=words, stops=stops, name=directory.resolve().name, made=int(time.time()))


def application(service: Service) -> Starlette:
    """The routes around it."""
    routes = [
        Route("/v1/completions", partial(_completions, service), methods=["POST"]),
        Route("/v1/models", partial(_models, service), methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: _elsewhere, 405: _elsewhere})


async def _elsewhere(request: Request, error: Exception) -> Response:
    """What clients of other routes are told (chat completions), in the protocol's form."""
    said = (
        f"{request.method} {clipped(request.url.path)} is not served. There are POST /v1/completions, "
        "GET /v1/models and GET /health."
    )
    status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None)
    return _json(protocol.error(said, "invalid_request_error"), status, headers)


async def _health(_: Request) -> Response:
    return _json(b'{"status":"ok"}')


async def _models(service: Service, _: Request) -> Response:
    return _json(protocol.models(service.name, service.made))


async def _completions(service: Service, request: Request) -> Response:
    try:
        body = await _body(request)
        asked = protocol.read(body)
        if asked.model not in ("", service.name):
            return _json(
                protocol.error(
                    f"There is no model {asked.model!r}; {service.name!r} is served.", "invalid_request_error"
                ),
                404,
            )
        answering = _take(service, asked)
    except UsageError as error:
        return _json(protocol.error(str(error), "invalid_request_error"), 400)
    except BusyError as error:
        return _json(protocol.error(str(error), "overloaded_error"), 429, {"Retry-After": "1"})
    except ClientDisconnect:
        return Response(status_code=499)
    except asyncio.CancelledError:  # it sent half of a body, and the server was told to stop
        return _json(protocol.error(_BROKEN["cancelled"][1], "server_error"), _BROKEN["cancelled"][0])
    name = f"cmpl-{uuid.uuid4().hex}"
    if asked.stream:
        return StreamingResponse(
            _streamed(service, answering, name, counts=asked.counts), media_type="text/event-stream"
        )
    return await _whole(service, answering, name, request)


async def _body(request: Request) -> bytes:
    """Raises UsageError for one that is too long."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BODY:
            raise UsageError(f"The body is longer than {_MOST_BODY} bytes.")
    return b"".join(parts)


def _take(service: Service, asked: protocol.CompletionBody) -> Answering:
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
    wishes = protocol.wishes(asked, service.encode, service.stops)
    tickets = service.desk.take(wishes, [_teller(loop, events, at) for at in range(len(wishes))])
    return Answering(
        tickets=tickets,
        choices=asked.n or 1,
        texts=[Text(service.decode, asked.stops()) for _ in tickets],
        events=events,
    )


def _teller(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], at: int
) -> Callable[[int | None, End | None], None]:
    def told(token: int | None, ended: End | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, (at, token, ended))

    return told


async def _streamed(
    service: Service, answering: Answering, name: str, *, counts: bool
) -> AsyncIterator[bytes]:
    """Pieces as server-sent events, then the counts of tokens; the server closes this where the client is
    gone.
    """
    async for at, piece, ended in answering.pieces():
        if ended in _BROKEN:
            yield b"data: " + protocol.error(_BROKEN[ended][1], "server_error") + b"\n\n"
        else:
            yield (
                b"data: " + protocol.answer(name, service.name, [protocol.choice(at, piece, ended)]) + b"\n\n"
            )
    if counts:
        yield b"data: " + protocol.answer(name, service.name, [], answering.tokens()) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _whole(service: Service, answering: Answering, name: str, request: Request) -> Response:
    """All of it at once, unless the client is gone before."""
    said, ends = [""] * len(answering.tickets), dict[int, End]()

    async def collect() -> None:
        async for at, piece, ended in answering.pieces():
            said[at] += piece
            if ended is not None:
                ends[at] = ended

    collecting, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        answering.cancel()
    if not collecting.done():
        collecting.cancel()
        return Response(status_code=499)
    await collecting
    for status, why in (_BROKEN[end] for end in _BROKEN if end in ends.values()):
        return _json(protocol.error(why, "server_error"), status)
    choices = [protocol.choice(at, text, ends[at]) for at, text in enumerate(said)]
    return _json(protocol.answer(name, service.name, choices, answering.tokens()))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")
