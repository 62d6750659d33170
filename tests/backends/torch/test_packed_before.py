"""Packed weights go from one lowering to the next where neither the weight nor its form changed."""

from __future__ import annotations

import torch

from effcompile.backends.torch.packed_before import Packed, keeping, packed_as
from effcompile.ir.formats import LINEAR_FORMATS, Form

EIGHT, FOUR = LINEAR_FORMATS["int8_groups"], LINEAR_FORMATS["int4_groups"]


def test_what_is_the_same_is_packed_once() -> None:
    weights = {site: torch.randn(4, 4) for site in "abc"}
    packed: Packed = {}
    made: list[str] = []

    def lower(formats: dict[str, str]) -> None:
        forms = {site: Form(weights=LINEAR_FORMATS[name]) for site, name in formats.items()}
        with keeping(packed, forms):
            assert len(packed) <= sum((site, form.weights) in packed for site, form in forms.items())
            for site, form in forms.items():
                assert form.weights is not None

                def pack(site: str = site) -> tuple[torch.Tensor, ...]:
                    made.append(site)
                    return (weights[site] + 1,)

                (found,) = packed_as(site, form.weights, weights[site].t().t(), pack)
                assert torch.equal(found, weights[site] + 1)

    lower({"a": "int8_groups", "b": "int8_groups", "c": "int4_groups"})
    assert made == ["a", "b", "c"] and len(packed) == 3
    lower({"a": "int8_groups", "b": "int4_groups"})
    assert made == ["a", "b", "c", "b"] and {*packed} == {("a", EIGHT), ("b", FOUR)}
    weights["a"] = weights["a"] * 2  # another weight, as a pass makes one
    lower({"a": "int8_groups", "b": "int4_groups"})
    assert made == ["a", "b", "c", "b", "a"]
    packed_as("a", EIGHT, weights["a"], lambda: (made.append("alone") or weights["a"],))  # type: ignore[func-returns-value]
    assert made[-1] == "alone"  # a lowering of its own keeps nothing
