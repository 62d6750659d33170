"""What was lowered, run: what a runtime raises becomes an error that says what failed and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from effcompile.core.errors import EffcompileError, LoweringError
from effcompile.core.stages import first_line

T = TypeVar("T")


def carried(what: str, run: Callable[[], T], remedy: str) -> T:
    """What `run` gives.

    Args:
        what: is run, as a message begins.
        run: the call.
        remedy: what to do where it fails, in sentences.

    Raises:
        EffcompileError: as it is raised. LoweringError: anything else, for the runtimes' errors have no
            common base: of memory, of shapes.
    """
    try:
        return run()
    except EffcompileError:
        raise
    except Exception as error:
        raise LoweringError(f"{what} failed with these inputs: {first_line(error)}. {remedy}") from error
