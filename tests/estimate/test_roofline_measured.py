"""What the data sheet of an H100 predicts, with the shares of its peak that families of kernels reach,
against what one took.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fx_calls import call_of
from torch import fx

from effcompile.estimate.roofline import roofline_seconds
from effcompile.machine.machines import known_targets, load_target
from effcompile.machine.target import KernelCall

ATEN, OURS = torch.ops.aten, torch.ops.effcompile
#: Widths of a head and milliseconds of a causal attention in bf16, 16,384 tokens of 2,048 (docs/machines.md,
#: 2026-11-22).
FORWARD = {"ours": {128: 2.46, 64: 2.98}, "stock": {128: 3.32, 64: 3.62}}
BACKWARD = {"ours": {128: 2.91 + 4.26, 64: 3.12 + 4.94}, "stock": {128: 8.80, 64: 9.94}}
CASES = [(whose, d) for whose in ("ours", "stock") for d in (128, 64)]


def nodes(whose: str, d: int, *, causal: bool = True) -> tuple[fx.Node, fx.Node]:
    """Forward and backward."""
    q = torch.empty(1, 2048 // d, 16384, d, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 2048 // d, 16384, device="meta")
    if whose == "ours":
        form: dict[str, Any] = {"scale": d**-0.5} | ({"hi": 0} if causal else {})
        forward = call_of(OURS.attention.default, q, q, q, results=(q, lse), **form)
        return forward, call_of(
            OURS.attention_backward.default,
            q,
            q,
            q,
            q,
            q,
            lse,
            results=(q, q, q, q.new_empty(0), q.new_empty(0)),
            **form,
        )
    forward = call_of(
        ATEN._scaled_dot_product_flash_attention.default, q, q, q, 0.0, causal, results=(q, lse)
    )
    more = (None, None, 16384, 16384, 0.0, causal, None, None)
    return forward, call_of(
        ATEN._scaled_dot_product_flash_attention_backward.default,
        q,
        q,
        q,
        q,
        q,
        lse,
        *more,
        results=(q, q, q),
    )


@pytest.mark.parametrize(("whose", "d"), CASES)
def test_attention_takes_what_it_took(whose: str, d: int) -> None:
    """Within a fifth; by one efficiency for all kernels ours was twice too fast."""
    target = load_target("h100-sxm")
    forward, backward = (1e3 * roofline_seconds(node, target) for node in nodes(whose, d))
    assert forward == pytest.approx(FORWARD[whose][d], rel=0.2)
    assert backward == pytest.approx(BACKWARD[whose][d], rel=0.2)


def test_without_a_causal_mask_it_takes_twice_as_long() -> None:
    target = load_target("h100-sxm")
    for whose in ("ours", "stock"):
        for half, whole in zip(nodes(whose, 128), nodes(whose, 128, causal=False), strict=True):
            assert roofline_seconds(whole, target) == pytest.approx(
                2 * roofline_seconds(half, target), rel=0.01
            )


def test_linears_of_codes_and_attention_of_a_model_are_priced_so_too() -> None:
    """By the names of kernels that passes ask for; products and what bytes bound go by the efficiency, as
    before.
    """
    target = load_target("h100-sxm")
    call = KernelCall("linear/int8_channel", (8192, 8192, 8192))
    assert target.roofline(call)[0] == pytest.approx(
        2 * 8192**3 / (target.peak_flops["int8"] * 0.25), rel=0.02
    )
    plain = KernelCall("linear/bf16", (8192, 8192, 8192))
    assert target.roofline(plain)[0] == pytest.approx(
        2 * 8192**3 / (target.peak_flops["bf16"] * 0.75), rel=0.02
    )
    shape = (1, 16, 16384, 16384, 128)
    tiled, stock = (target.roofline(KernelCall(name, dims)) for name, dims in
                    (("attention/tiled", (*shape, 16384)), ("attention/sdpa", shape)))  # fmt: skip
    assert (
        tiled is not None
        and stock is not None
        and stock[0] == pytest.approx(tiled[0] * 0.41 / 0.32, rel=0.01)
    )


@pytest.mark.parametrize("name", known_targets())
def test_shares_have_a_source_and_are_less_than_what_good_kernels_reach(name: str) -> None:
    target = load_target(name)
    assert not target.shares or len(target.sources["shares"]) > 20
    assert all(0 < share <= target.efficiency for share in target.shares.values())
    assert target.share("no such family") == target.efficiency
