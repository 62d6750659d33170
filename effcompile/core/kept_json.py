"""What is kept in the cache as JSON: a file that cannot be read or written costs finding it again, nothing
else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from effcompile.core.errors import EffcompileError
from effcompile.core.files import keep, read_kept


def recalled(
    path: Path, kind: Any, most_bytes: int, what: str, hook: Callable[[type, object], Any] | None = None
) -> Any:
    """The value of a file, validated as msgspec does; None where there is none, or none of this kind. `hook`:
    makes what msgspec cannot.
    """
    try:
        return msgspec.json.decode(read_kept(path, most_bytes, what), type=kind, dec_hook=hook)
    except (EffcompileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def remember(path: Path, value: Any, most_files: int) -> None:
    """Keep a value, and no more files beside it than there may be: the oldest go."""
    with contextlib.suppress(EffcompileError, OSError):
        keep(path, msgspec.json.encode(value), most_files)
