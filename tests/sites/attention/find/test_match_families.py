"""Whole models in eager attention: every layer matched, outputs and gradients theirs.

The full table: benchmarks/attention_families.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from _attention_families import Sizes
from attention_families import probe
from generation_models import more

#: One per variant, with as many layers as it has kinds of them; of llama, two that are alike; of
#: gpt-oss one: its two kinds are those of gemma2.
FAST = {
    "llama": 2, "gemma2": 2, "gpt_oss": 1, "t5": 1, "bloom": 1, "falcon": 1,
    "deberta-v2": 1, "deepseek_v3": 1, "swinv2": 2, "xlnet": 1,
    **dict.fromkeys(more("mpt"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_every_attention_is_replaced_and_equal(name: str) -> None:
    row = probe(name, Sizes(layers=FAST[name]), "attention")
    assert row.passed, row
    assert row.padding > 1e-3 or name == "swinv2", "the mask must matter"


def test_sdpa_form_runs_without_our_operator() -> None:
    row = probe("llama", Sizes(layers=1), "sdpa")
    assert row.passed, row
