"""Tokens as pieces of text, as they come; and the stop texts that end a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What a tokenizer writes for a part of a character.
_PART = "\ufffd"


class Text:
    """The text of one request.

    A piece is the difference of what the last tokens read with and without the new ones, since how a token
    reads hangs on those before. What may be the beginning of a stop text is held back until it is known.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._from = self._read = 0
        self._kept = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that one more token makes certain."""
        self._ids.append(token)
        return self._told(self._piece(last=False), last=False)

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return self._told(self._piece(last=True), last=True)

    def _piece(self, *, last: bool) -> str:
        before, after = (
            self._decode(self._ids[self._from : self._read]),
            self._decode(self._ids[self._from :]),
        )
        if not last and (len(after) <= len(before) or after.endswith(_PART)):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _told(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._kept + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that may begin a stop text."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
