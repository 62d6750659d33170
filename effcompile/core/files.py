"""Where effcompile writes: its cache, and files that are whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from effcompile.core.errors import UsageError


def cache_folder() -> Path:
    """Where effcompile keeps what it measured and built."""
    if own := os.environ.get("EFFCOMPILE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "effcompile"
    try:
        return Path.home() / ".cache" / "effcompile"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "effcompile"


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a file so that it is whole or absent: temporary file beside it, fsync, rename.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(f"Cannot write {str(path)!r}: {error.strerror or error}. Choose a folder you may write to with -o.") from error
    return path
