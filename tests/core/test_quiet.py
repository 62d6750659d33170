"""Libraries are kept quiet for the thread that calls them, and for nobody else."""

import logging
import threading

import pytest

from effcompile.core.quiet import as_it_logs, quiet_libraries


def test_only_this_thread_and_the_named_libraries_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with quiet_libraries("noisy"):
        logging.warning("advice of ours")
        logging.getLogger("noisy.part").warning("advice of a library")
        logging.getLogger("server").warning("a request")
        other = threading.Thread(target=logging.warning, args=("another thread",))
        other.start()
        other.join()
        logging.error("an error")
    logging.warning("afterwards")
    logging.getLogger("noisy.part").warning("afterwards, too")
    assert [record.getMessage() for record in caplog.records] == [
        "a request",
        "another thread",
        "an error",
        "afterwards",
        "afterwards, too",
    ]


def test_nothing_stays_after_an_error() -> None:
    before = list(logging.root.filters)
    with pytest.raises(KeyError), quiet_libraries("noisy"):
        raise KeyError
    assert logging.root.filters == before
    assert logging.getLogger("noisy").level == logging.NOTSET


def test_an_import_that_configures_logging_leaves_the_users_root_as_it_was() -> None:
    root = logging.root
    before, level = list(root.handlers), root.level
    for handler in before:
        root.removeHandler(handler)
    try:
        with as_it_logs():
            logging.basicConfig(
                format="%(asctime)s %(name)s [%(levelname)s] - %(message)s", level=logging.INFO
            )
            assert root.handlers
        assert root.handlers == [] and root.level == level
    finally:
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
