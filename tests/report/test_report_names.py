"""Collapsed names stand for exactly the sites that went in."""

from __future__ import annotations

import re
from itertools import product

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from effcompile.report.groups import groups, refusals, saved_seconds
from effcompile.report.names import collapse, inputs_told

LAYERS = [f"encoder.layer.{i}" for i in range(12)]


def expand(text: str) -> list[str]:
    """The sites a template stands for."""
    parts = re.split(r"(\{[^}]*\})", text)
    return ["".join(choice) for choice in product(*(_alternatives(part) for part in parts))]


def _alternatives(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    found = []
    for item in part[1:-1].split(","):
        first, dash, last = item.partition("–")
        found += [str(i) for i in range(int(first), int(last) + 1)] if dash else [item]
    return found


@pytest.mark.parametrize(
    ("sites", "texts"),
    [
        (
            [f"{layer}.attention.self.query" for layer in LAYERS],
            ["encoder.layer.{0–11}.attention.self.query"],
        ),
        (
            [f"{layer}.{x}" for layer in LAYERS for x in ("query", "key")],
            ["encoder.layer.{0–11}.{query,key}"],
        ),
        (["h.0.mlp", "h.2.mlp", "h.3.mlp"], ["h.{0,2–3}.mlp"]),
        (["h.3.mlp"], ["h.3.mlp"]),
        (["wte"], ["wte"]),
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"], ["l.{0–1}.e.{0–1}.w"]),
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.1.w"], ["l.0.e.{0–1}.w", "l.1.e.1.w"]),
        (["block_0.fc1", "block_1.fc1", "block_0.fc2", "block_1.fc2"], ["block_{0–1}.{fc1,fc2}"]),
        (["a.01.w", "a.02.w"], ["a.01.w", "a.02.w"]),
        (["h.0.attn:merge", "h.1.attn:merge"], ["h.{0–1}.attn:merge"]),
        ([], []),
    ],
)
def test_collapse(sites: list[str], texts: list[str]) -> None:
    assert [t.text for t in collapse(sites)] == texts


names = st.lists(
    st.one_of(st.sampled_from(["h", "attn", "mlp", "fc1", "w_2", "01"]), st.integers(0, 12).map(str)),
    min_size=1,
    max_size=4,
)


@given(st.lists(names.map(".".join), max_size=40))
def test_templates_expand_to_exactly_the_sites(sites: list[str]) -> None:
    templates = collapse(sites)
    if any("…" in t.text for t in templates):
        assert sum(t.count for t in templates) == len(set(sites))
        return
    expanded = [site for t in templates for site in expand(t.text)]
    assert sorted(expanded) == sorted(set(sites))
    assert [len(expand(t.text)) for t in templates] == [t.count for t in templates]


def test_groups_sum_what_they_hold() -> None:
    decisions = samples.decisions()
    found = groups(decisions)
    assert sum(len(g.decisions) for g in found) == len(decisions)
    saved = sum(d.baseline_cost.seconds - d.cost.seconds for d in decisions)
    assert sum(saved_seconds(d) for g in found for d in g.decisions) == pytest.approx(saved)
    assert [g.kind for g in found if g.kept][-2:] == ["norm", "gelu"], "kinds that stay as they are come last"


def test_equal_reasons_are_one_row_with_the_range_of_their_figures() -> None:
    bf16 = next(r for r in refusals(samples.declined()) if r.option == "bf16")
    assert len(bf16.sites) == 72
    assert bf16.reason == "not faster: 1.71–7.11 ms against 900 µs–3.74 ms (fp32)"


def test_the_layers_of_a_cache_are_one_input() -> None:
    """What differs in more than a number stays apart, in order of first appearance."""
    sizes = "[batch=2 × past=12 × 64] float32"
    lines = ["tokens [2 × seq=3] int64", "mask [2 × seq=3] int64"]
    layers = [f"past_{at} {sizes}" for at in range(48)]
    others = ["past_48 [2 × 50 × 64] float32", "scale"]
    assert inputs_told([*lines, *layers, *others]) == [*lines, f"past_{{0–47}} {sizes}", *others]
    assert inputs_told([]) == []
