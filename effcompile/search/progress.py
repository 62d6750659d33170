"""What the compiler tells while it works; the CLI shows it, a library call stays silent."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

from effcompile.core import gpu
from effcompile.core.building import building
from effcompile.core.errors import UsageError
from effcompile.core.stages import entered, first_line, stage
from effcompile.estimate.kept import reading_once
from effcompile.machine.room import planning

P = ParamSpec("P")
R = TypeVar("R")


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
#: `logging.getLogger("effcompile")` tells each step at the level INFO.
log = logging.getLogger("effcompile")


class _Staged:
    """The steps of another, each a stage that an error which nobody foresaw is named after."""

    def __init__(self, steps: Progress) -> None:
        self._steps = steps

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        log.info("%s", name)
        with ExitStack() as stack:
            with _theirs():
                stack.enter_context(self._steps.step(name))
            stack.enter_context(stage(name))
            yield

    def update(self, name: str, done: int, total: int) -> None:
        with _theirs():
            self._steps.update(name, done, total)


@contextmanager
def _theirs() -> Iterator[None]:
    """What the user's own Progress raises is no fault of a stage.

    Raises:
        UsageError: it raised something.
    """
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"The `progress` that was given raised {first_line(error)}. Nothing was planned."
        ) from error


def entry(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an entry point that takes a model, its inputs and `progress`: only EffcompileErrors leave it,
    whatever step they come from.

    Within it the GPU that the model lies on is the current device, and random numbers that it draws are the
    user's again afterwards.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            progress = kwargs.get("progress", QUIET)
            kwargs["progress"] = _Staged(progress)  # type: ignore[arg-type]
            place = gpu.place_of(*args[:3])  # type: ignore[arg-type]  # model, args, kwargs
            with (
                entered(), stage(name), planning(), building(), reading_once(),
                gpu.current(place), gpu.undrawn(),
            ):  # fmt: skip
                return function(*args, **kwargs)

        return run

    return decorate
