"""Libraries kept quiet while we call them, and nobody else: a server's other threads log as before."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries(*names: str) -> Iterator[None]:
    """Within, the named libraries log errors only, and what this thread logs on the root logger itself is dropped below an error."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, names)}
    mine = threading.get_ident()

    def of_another_thread_or_an_error(record: logging.LogRecord) -> bool:
        return record.thread != mine or record.levelno >= logging.ERROR

    logging.root.addFilter(of_another_thread_or_an_error)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.removeFilter(of_another_thread_or_an_error)
        for logger, level in loggers.items():
            logger.setLevel(level)
