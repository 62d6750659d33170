"""Counts the cases of the fuzzers, and prints the counts when all tests have run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

_PROPERTY = "fuzz cases"


@pytest.fixture
def tally(record_property: Any) -> Iterator[Counter[str]]:
    """What a fuzzer did, counted: `tally["training: steps compared"] += 1`.

    Also with `@given`, across its examples.

    The counts of equal names are summed over the tests and over the workers of pytest-xdist.
    """
    counts: Counter[str] = Counter()
    yield counts
    for what, count in counts.items():
        record_property(_PROPERTY, (what, count))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    counts[value[0]] += value[1]
    if counts:
        terminalreporter.section("cases of the fuzzers")
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:>9,}  {what}")
