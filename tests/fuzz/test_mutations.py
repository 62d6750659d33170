"""Plan once; then any sequence of changes, some taken back: each answer is the changed model's own, or
refused in words.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from fuzz_settings import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from mutations import HARMLESS, REVERSIBLE, Undo
from test_guards import Planned, made

CHANGES = REVERSIBLE | HARMLESS


@cache
def planned_as(kind: str) -> Planned:
    return made(kind)


@pytest.mark.parametrize("kind", ["torch-eager", "onnxruntime", "training"])
@fuzzed(15, share=1 / 3)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4, unique=True),
    kept=st.integers(1, 4),
)
def test_any_changes(kind: str, names: list[str], kept: int, tally: Counter[str]) -> None:
    planned = planned_as(kind)
    undos: list[Undo] = []
    try:
        for name in names:
            undos.append(CHANGES[name](planned.model))
            if len(undos) > kept:
                undos.pop()()
            answered = planned.agrees_or_is_refused()
            tally[f"mutations: {kind}, {'compared' if answered else 'refused'}"] += 1
    except (AttributeError, TypeError, RuntimeError):
        # changes that do not go together: the model itself raises
        tally[f"mutations: {kind}, the model itself raises"] += 1
    finally:
        while undos:
            undos.pop()()
    assert planned.agrees_or_is_refused(), "all was taken back, so that the plan holds"
