"""Libraries kept quiet while we call them, and nobody else: a server's other threads log as before."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Within, the named libraries log errors only (or from another level on), and what this thread logs on
    the root logger itself is dropped below an error.
    """
    loggers = {logger: logger.level for logger in map(logging.getLogger, names)}
    mine = threading.get_ident()

    def of_another_thread_or_an_error(record: logging.LogRecord) -> bool:
        return record.thread != mine or record.levelno >= logging.ERROR

    logging.root.addFilter(of_another_thread_or_an_error)
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        logging.root.removeFilter(of_another_thread_or_an_error)
        for logger, before in loggers.items():
            logger.setLevel(before)


@contextlib.contextmanager
def as_it_logs() -> Iterator[None]:
    """Within, what an import does to the root logger (`logging.basicConfig` as a module's side effect) is
    undone: it is the user's.
    """
    root = logging.root
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in [added for added in root.handlers if added not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
