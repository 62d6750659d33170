"""The line of an error that tells something."""

from __future__ import annotations

import pytest

from effcompile.core.stages import first_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("a\nb", "a"),
        ("\n  b\n", "b"),
        ("", "no message"),
        ("x" * 999, "x" * 286),
        (
            "Exception from src/a.cpp:84:\nCheck 'size()' failed at src/b.cpp:900:\nNo such bytes!\n",
            "No such bytes!",
        ),
        ("Exception from src/a.cpp:84:\n", "Exception from src/a.cpp:84:"),
        ("Check 'size()' failed at src/b.cpp:900", "Check 'size()' failed at src/b.cpp:900"),
    ],
)
def test_a_line_that_is_a_place_in_somebodys_sources_is_passed_over(said: str, line: str) -> None:
    """OpenVINO begins with these: who read the first one was told nothing."""
    assert first_line(RuntimeError(said)) == f"RuntimeError: {line}"
