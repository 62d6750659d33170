"""The count of cases is what was asked for, and every case that ran is counted."""

from collections import Counter

import fuzz_settings
import pytest
from fuzz_settings import cases, fuzzed
from hypothesis import given
from hypothesis import strategies as st


def test_the_suite_runs_the_default_and_make_fuzz_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_settings, "ASKED", None)
    assert cases(40, most=2000) == 40
    monkeypatch.setattr(fuzz_settings, "ASKED", 5000)
    assert (cases(40), cases(40, most=2000), cases(40, most=2000, share=0.25)) == (5000, 2000, 500)
    assert fuzzed(40, most=10).max_examples == 10


@fuzzed(20)
@given(number=st.integers())
def test_the_tally_lasts_over_the_examples(number: int, tally: Counter[str]) -> None:
    tally["settings: numbers drawn"] += 1
    assert isinstance(number, int)
