"""What tells a living writer from a dead one, and what brings its work to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


def lock(handle: int) -> bool | None:
    """Take the lock of an open file or folder, which its process gives back when it ends, however it ends.

    False where somebody else holds it: they live. None where there are no locks, so that nobody is known to be dead.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


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
