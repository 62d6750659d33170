"""Whole models in eager attention: every layer matched, outputs and gradients theirs. The full table: benchmarks/attention_families.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from _attention_families import Sizes
from attention_families import probe

#: One per variant.
FAST = ("llama", "gemma2", "gpt_oss", "t5", "bloom", "falcon", "mpt", "deberta-v2", "deepseek_v3", "swinv2", "xlnet")


@pytest.mark.parametrize("name", FAST)
def test_every_attention_is_replaced_and_equal(name: str) -> None:
    row = probe(name, Sizes(), "attention")
    assert row.passed, row
    assert row.padding > 1e-3 or name == "swinv2", "the mask must matter"


def test_sdpa_form_runs_without_our_operator() -> None:
    row = probe("llama", Sizes(), "sdpa")
    assert row.passed, row
