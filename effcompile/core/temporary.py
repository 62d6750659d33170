"""Folders of one process: removed when it ends, and by a later process when it was killed."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from effcompile.core.disk import abandoned, lock

_held: dict[Path, int] = {}  # folder → the descriptor whose lock says that its process lives


def own_folder(prefix: str) -> Path:
    """A new folder that only this user may enter, removed at exit; those of dead processes with this prefix
    go now.

    Raises:
        OSError: there is no place for temporary files.
    """
    base = Path(tempfile.gettempdir())
    _remove_dead(base, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process took it for a dead one's, and it is gone already
            continue
        if lock(handle) is not False and folder.exists():  # else it is a dead one's to another
            _held[folder] = handle
            atexit.register(_at_exit, folder, os.getpid())
            return folder
        os.close(handle)


def remove(folder: Path) -> None:
    """Remove such a folder before the process ends."""
    shutil.rmtree(folder, ignore_errors=True)
    if (handle := _held.pop(folder, None)) is not None:
        os.close(handle)


def _at_exit(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves it to its parent
        remove(folder)


def _remove_dead(base: Path, prefix: str) -> None:
    for folder in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with abandoned(folder) as dead:
                if dead:
                    shutil.rmtree(folder, ignore_errors=True)
