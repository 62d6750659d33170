"""What tells a living writer from a dead one and lets writers take turns, and what brings their work to the
disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_PATIENCE, _PAUSE = 10.0, 0.001


def lock(handle: int, *, shared: bool = False) -> bool | None:
    """Take the lock of an open file or folder, which its process gives back when it ends, however it ends.

    False where somebody else holds it: they live. None where there are no locks, so that nobody is known to
    be dead.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether the writer that locked a file or folder is dead. If so nobody else is told the same meanwhile.

    Raises:
        OSError: it is gone, a link, or somebody else's.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        yield bool(lock(handle))
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, alone or with others that share it, for as long as some renames take.

    Nobody holds it for seconds but a stranger or a process that was stopped: after ten the work goes on
    without the lock, as it does where there are none.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            until = time.monotonic() + _PATIENCE
            while (taken := lock(handle, shared=shared)) is False and time.monotonic() < until:
                time.sleep(_PAUSE)
            if taken:
                # a child forked meanwhile keeps the file open, and with it the lock
                held.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to do for a folder
            raise
    finally:
        os.close(handle)
