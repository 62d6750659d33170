"""Whether a model is being planned or built now: then it may take seconds to find out something, and never
within a user's own step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["building", "under_way"]

#: Of the process and not of a context: autograd runs the backward of what is being verified in threads of its
#: own.
_lock, _depth = threading.Lock(), [0]


@contextmanager
def building() -> Iterator[None]:
    """Within it, something is being planned or built."""
    with _lock:
        _depth[0] += 1
    try:
        yield
    finally:
        with _lock:
            _depth[0] -= 1


def under_way() -> bool:
    """Whether anything is."""
    return _depth[0] > 0
