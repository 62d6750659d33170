"""The last line of defence: what nobody foresaw leaves effcompile as one of its own errors, which names the
stage it came from.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar

from effcompile.core.errors import EffcompileError, InternalError

#: What a user may try where the stage knows nothing better.
AROUND = (
    "leave a pass out (--pass no-NAME, passes=['no-NAME']), choose another backend (backend=...), or "
    "fix all shapes (dynamic=False)"
)

#: How allocators word it; torch raises a plain RuntimeError on a CPU.
_SHORT = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|cannot allocate memory", re.IGNORECASE
)

#: Lines of OpenVINO's errors before their words: places in its sources.
_PLACE = re.compile(r"(Exception from|Check '.*' failed at) \S+:\d+:")

#: What the caller was handling when effcompile was entered.
_BEFORE: ContextVar[BaseException | None] = ContextVar("before", default=None)


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Within, `causes` end before what is being handled now, to which Python chains whatever is raised: a
    refused call is answered by planning again, and users plan again in an `except`, too.
    """
    token = _BEFORE.set(sys.exc_info()[1])
    try:
        yield
    finally:
        _BEFORE.reset(token)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what caused it, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and current is not _BEFORE.get():
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


@contextlib.contextmanager
def stage(name: str, around: str = AROUND) -> Iterator[None]:
    """Whatever is raised within and is no error of ours becomes one that names this stage; the innermost
    stage wins.

    Args:
        name: what is being done: "capture", "lower to onnxruntime".
        around: what the user may try instead, as the end of "To get around it, ...".

    Raises:
        InternalError: what was not foreseen. Memory that runs out is passed on: the entry point says it
            (machine/room.py).
    """
    try:
        yield
    except EffcompileError:
        raise
    except Exception as error:
        if is_no_memory(error):
            raise
        raise wrapped(error, name, around) from error


def without(name: str) -> str:
    """How to get around a pass."""
    return f"leave it out with --pass no-{name}, or passes=['no-{name}']"


def is_no_memory(error: BaseException) -> bool:
    """Whether the system, a limit of it or an allocator gave no more memory."""
    return (
        isinstance(error, MemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or bool(_SHORT.search(str(error)))
    )


def wrapped(error: Exception, name: str, around: str = AROUND) -> EffcompileError:
    """The error of ours that stands for one that nobody foresaw."""
    said = first_line(error)
    return InternalError(
        name,
        f"effcompile failed at the stage {name!r}: {said}. This is a bug in effcompile, not in your model. "
        "Please report this message with its traceback, your model and the versions of effcompile and "
        f"torch. To get around it, {around}.",
    )


def first_line(error: BaseException) -> str:
    """`Type: first line` of an exception that says more than where it was raised, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if not _PLACE.fullmatch(line)), lines[-1] if lines else "no message")
    return f"{type(error).__name__}: {line}"[:300]
