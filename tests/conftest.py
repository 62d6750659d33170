"""What all tests share."""

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest
from hypothesis import settings

# Everyone's cases are CI's, where hypothesis draws them from the test itself; `make fuzz` draws them anew.
if not os.environ.keys() & {"EFFCOMPILE_FUZZ_CASES", "EFFCOMPILE_EVERY"}:
    settings.load_profile("ci")


def pytest_configure() -> None:
    """A shell has its background jobs ignore SIGINT, and what they start; tests that send it are not to."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not look at it again and again, which takes a seventh of
    every capture.

    Of what captures and plans, it takes another 4 % at its usual thresholds, and one of 50,000 objects still
    5 to 10 %; the memory is no more, for a file ends with a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(400_000, 10, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """So does what is there when a file is done, the caches of torch above all: of thousands of tests it is
    so much that a collection, which some tests and we ask for, takes half a second.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _as_on_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other: what two plans of a test time is not to differ as others come and go."""
    if costs := sys.modules.get("effcompile.search.training.operator_costs"):
        monkeypatch.setattr(costs, "busy", lambda: "")
