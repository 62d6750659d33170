"""What the compiler tells while it works; the CLI shows it, a library call stays silent."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """A named step that runs, and counts within it."""

    def step(self, name: str) -> AbstractContextManager[None]: ...

    def update(self, name: str, done: int, total: int) -> None: ...


class Quiet:
    """Tells nothing."""

    def step(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, name: str, done: int, total: int) -> None:
        return None


QUIET: Progress = Quiet()
