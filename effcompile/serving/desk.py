"""Requests in, tokens out: a bounded queue, and one thread that computes one token of every request that has
a place, again and again.

A prompt is read in chunks between the others' tokens, so that a long one does not hold them up for longer
than a chunk takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers.generation import logits_process

from effcompile.capture.caches import HFCache, seen_by
from effcompile.core.errors import EffcompileError, UsageError
from effcompile.runtime.generation.rows import SharedRows

#: Why no more tokens come.
End = Literal["stop", "length", "cancelled", "failed"]
#: Tokens of a prompt that are read between two tokens of the others.
_CHUNK = 256
#: Below this temperature the likeliest token is taken: logits divided by less are no numbers any more.
_COLD = 1e-5
#: Tokens in common with an earlier prompt from which on its cache is begun with.
_COMMON = 16


class BusyError(EffcompileError):
    """The queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request asks for.

    Attributes:
        prompt: token ids.
        most: new tokens at the most.
        temperature: 0 takes the likeliest token. top_p: of the likeliest tokens with so much probability
            together.
        seed: of the request's own random numbers; None draws one.
        stops: tokens that end it, and are not said.
    """

    prompt: tuple[int, ...]
    most: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stops: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A request that was taken.

    `said` is called from the thread that computes: with each token, then with why it ended.
    """

    wish: Wish
    said: Callable[[int | None, End | None], None]
    given: list[int] = field(default_factory=list)
    ended: End | None = None
    _dropped: bool = False
    _random: torch.Generator | None = None

    def cancel(self) -> None:
        """Nobody waits for it any longer: its place is free at the next token.

        From any thread, more than once.
        """
        self._dropped = True

    @property
    def dropped(self) -> bool:
        """Whether nobody waits for it."""
        return self._dropped

    def take(self, logits: torch.Tensor) -> None:
        """One more token, of logits (vocabulary).

        Of such as none can be drawn from this request fails, and no other one.
        """
        if self._dropped:
            return
        try:
            token = self._drawn(logits.float())
        except Exception:
            self.end("failed")
            return
        if token in self.wish.stops:
            self.end("stop")
            return
        self.given.append(token)
        self._say(token, None)
        if len(self.given) >= self.wish.most:
            self.end("length")

    def end(self, why: End) -> None:
        """No more tokens come."""
        if self.ended is None:
            self.ended = why
            self._say(None, why)

    def _say(self, token: int | None, ended: End | None) -> None:
        """Whoever cannot be told is gone: it is none of the others' business."""
        try:
            self.said(token, ended)
        except Exception:
            self._dropped = True

    def _drawn(self, logits: torch.Tensor) -> int:
        if self.wish.temperature < _COLD:
            return int(logits.argmax())
        if self._random is None:
            self._random = torch.Generator()
            if self.wish.seed is None:
                self._random.seed()
            else:
                self._random.manual_seed(self.wish.seed)
        ids, scores = torch.empty((1, 0), dtype=torch.int64), logits[None]
        scores = logits_process.TemperatureLogitsWarper(self.wish.temperature)(ids, scores)
        if self.wish.top_p < 1:
            scores = logits_process.TopPLogitsWarper(self.wish.top_p)(ids, scores)
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._random))


class Desk:
    """Takes requests from any thread; `places` of them are computed at once, `queue` more wait.

    The caches of the last `prompts` prompts are kept for those that begin alike: so many rows of the whole
    context, beside the plan's memory.

    Attributes:
        vocabulary: token ids are below it.
    """

    def __init__(
        self, rows: SharedRows, vocabulary: int, *, places: int, queue: int, prompts: int = 0
    ) -> None:
        self._rows, self.vocabulary, self._places, self._queue = rows, vocabulary, places, queue
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._here: list[Ticket] = []
        self._closed = False
        self._reading: tuple[Ticket, HFCache] | None = None
        self._prompts: deque[tuple[tuple[int, ...], HFCache]] = deque(maxlen=prompts)
        self._thread = threading.Thread(target=self._work, name="effcompile-serve", daemon=True)
        self._thread.start()

    @property
    def context(self) -> int:
        """Tokens of a request at the most, prompt and new ones."""
        return self._rows.context

    def check(self, wish: Wish) -> None:
        """Refuse what cannot be computed.

        Raises:
            UsageError: no prompt, unknown tokens, or more tokens than there is room for.
        """
        prompt = len(wish.prompt)
        if not prompt:
            raise UsageError("The prompt has no tokens. Give at least one.")
        if any(not 0 <= token < self.vocabulary for token in wish.prompt):
            raise UsageError(
                f"The prompt has token ids that the model does not know: it has 0 to {self.vocabulary - 1}."
            )
        if wish.most < 1 or prompt + wish.most > self.context:
            raise UsageError(
                f"{prompt} tokens of prompt and {wish.most} new ones: a request has at least one new token "
                f"and at most {self.context} in all. {_advice(prompt, self.context)}"
            )

    def take(
        self, wishes: Sequence[Wish], said: Sequence[Callable[[int | None, End | None], None]]
    ) -> list[Ticket]:
        """Take all of these requests, or none.

        Raises:
            UsageError: one that cannot be computed. BusyError: the queue has no room for them.
        """
        for wish in wishes:
            self.check(wish)
        tickets = [Ticket(wish=wish, said=tell) for wish, tell in zip(wishes, said, strict=True)]
        with self._changed:
            waiting = sum(not ticket.dropped for ticket in self._waiting)
            free = self._places - len(self._here) - (self._reading is not None)
            if self._closed or waiting + len(tickets) > self._queue + max(0, free):
                raise BusyError(f"{waiting} requests wait already, and {self._queue} may. Try again later.")
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def close(self) -> None:
        """End all requests, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._has_work():
                try:
                    self._turn()
                except Exception:  # of the batch as a whole: whose fault it was is not known
                    self._end_all("failed")
        finally:  # nobody computes any longer: nobody is to wait
            with self._changed:
                self._closed = True
            self._end_all("cancelled")

    def _has_work(self) -> bool:
        """Wait for some; False where the desk was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._waiting or self._here or self._reading is not None
            )
            return not self._closed

    def _end_all(self, why: End) -> None:
        """End those that have a place, and where the desk is closed those that wait, too: whatever state an
        error left the rows in.
        """
        with self._changed:
            gone = [
                *self._here,
                *([self._reading[0]] if self._reading else ()),
                *(self._waiting if self._closed else ()),
            ]
            self._here, self._reading = [], None
            for ticket in gone:
                ticket.end(why)
            self._rows.clear()

    def _turn(self) -> None:
        """A chunk of one prompt that is being read, and a token of each request that is."""
        come = [self._reading] if self._read() and self._reading is not None else []
        stay = [at for at, ticket in enumerate(self._here) if _goes_on(ticket)]
        if len(stay) < len(self._here) or come:
            self._rows.change(stay, [cache for _, cache in come])
            self._here = [*(self._here[at] for at in stay), *(ticket for ticket, _ in come)]
            self._reading = None if come else self._reading
        if self._here:
            logits = self._rows.next([ticket.given[-1] for ticket in self._here])
            for ticket, own in zip(self._here, logits, strict=True):
                ticket.take(own)

    def _read(self) -> bool:
        """Read a chunk of a prompt; whether that was its last, and the request wants more than its first
        token.
        """
        with self._changed:
            self._waiting = deque(filter(_goes_on, self._waiting))
            if self._reading is None and self._waiting and sum(map(_goes_on, self._here)) < self._places:
                self._reading = (self._waiting.popleft(), self._rows.opened())
        if self._reading is None:
            return False
        ticket, cache = self._reading
        try:
            if _goes_on(ticket):
                if not seen_by(cache):
                    cache = self._begun(ticket.wish.prompt)
                    self._reading = (ticket, cache)
                start = seen_by(cache)
                chunk = ticket.wish.prompt[start : start + _CHUNK]
                logits = self._rows.read(cache, chunk)
                if start + len(chunk) < len(ticket.wish.prompt):
                    return False
                self._prompts.append((ticket.wish.prompt, cache))
                ticket.take(logits)
        except Exception:  # of this request alone
            ticket.end("failed")
        if not _goes_on(ticket):
            self._reading = None
        return self._reading is not None

    def _begun(self, prompt: tuple[int, ...]) -> HFCache:
        """A cache for a prompt: with what it has in common with one of the last ones, all but its last token;
        else empty.
        """
        alike = [(min(_common(prompt, other), len(prompt) - 1), cache) for other, cache in self._prompts]
        tokens, cache = max(alike, key=lambda pair: pair[0], default=(0, None))
        begun = self._rows.begun(cache, tokens) if tokens >= _COMMON else None
        return self._rows.opened() if begun is None else begun


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _goes_on(ticket: Ticket) -> bool:
    """Whether a request wants more tokens; one that nobody waits for is ended."""
    if ticket.dropped:
        ticket.end("cancelled")
    return ticket.ended is None


def _advice(prompt: int, context: int) -> str:
    return (
        f"Ask for {context - prompt} or fewer."
        if prompt < context
        else "Give a shorter prompt, or plan again with a longer context."
    )
