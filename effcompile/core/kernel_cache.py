"""Libraries that a killed compiler left unfinished in Inductor's cache: found and removed, so that they are
compiled again.

Inductor compiles a kernel where its cache has no file of that name, and loads the one that is there. The
linker writes into the final place: if it is killed, what it had written stays, fails to load at every later
start ("file too short"), or ends the process when pages beyond the file's end are touched.
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

#: A younger file may still be in the linker's hands.
_OLD_SECONDS = 60.0
# 64-bit, little-endian: place, size and number of its sections
_MAGIC, _HEADER = b"\x7fELF\x02\x01", struct.Struct("<40xQ10xHH2x")


@cache
def mended(folder: str) -> int:
    """Remove the unfinished libraries of a cache, once a process; how many there were."""
    found = [path for path in Path(folder).glob("*/*.so") if unfinished(path)]
    for path in found:
        with suppress(OSError):  # another user's, or gone already
            path.unlink()
    return len(found)


def unfinished(path: Path) -> bool:
    """Whether a library ends before its table of sections does, which a linker writes last, and nobody is
    writing it any more.
    """
    try:
        status = path.stat()
        if time.time() - status.st_mtime < _OLD_SECONDS:
            return False
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return False
    if len(head) < _HEADER.size:
        return True
    place, each, count = _HEADER.unpack(head)
    return head.startswith(_MAGIC) and (not place or place + each * count > status.st_size)
