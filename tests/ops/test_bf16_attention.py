"""Attention in products of bf16: as torch has it of the same rounded numbers, whatever shape, mask
and threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core import torch_compat_memory
from effcompile.core.errors import LoweringError
from effcompile.machine import instructions
from effcompile.ops import bf16_attention as module
from effcompile.ops import bf16_attention_backward as backward
from effcompile.ops.bf16_attention import bf16_attention, fallback_reason, told
from effcompile.ops.workspace import workspace_bytes

#: A result is a mean of values with weights that are rounded to 8 bits each.
CLOSE = {"rtol": 1e-2, "atol": 8e-3}


@pytest.fixture(params=["here", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by torch":
        monkeypatch.setattr(module, "kernels", lambda: "asked for")
    return str(request.param)


def heads(batch: int, count: int, rows: int, width: int, seed: int) -> Tensor:
    """(B, H, S, D) as linears make them, heads side by side."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, count, width, generator=drawn).transpose(1, 2)


def wanted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """In fp64, of the rounded numbers."""
    q, k, v = (each.bfloat16().double() for each in (q, k, v))
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    ).float()


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shared=st.integers(1, 3),
    queries=st.integers(1, 70),
    keys=st.integers(1, 100),
    width=st.integers(1, 100),
    masked=st.sampled_from(["no", "bool", "row", "numbers", "causal"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_torch(
    batch: int,
    groups: int,
    shared: int,
    queries: int,
    keys: int,
    width: int,
    masked: str,
    threads: int,
    seed: int,
) -> None:
    q = heads(batch, groups * shared, queries, width, seed)
    k, v = heads(batch, groups, keys, width, seed + 1), heads(batch, groups, keys, width, seed + 2)
    drawn = torch.Generator().manual_seed(seed)
    mask = {
        "bool": lambda: torch.rand(batch, 1, queries, keys, generator=drawn) < 0.6,
        "row": lambda: torch.rand(batch, 1, 1, keys, generator=drawn) < 0.6,
        "numbers": lambda: torch.randn(1, groups * shared, queries, keys, generator=drawn),
    }.get(masked, lambda: None)()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = bf16_attention(q, k, v, mask, masked == "causal", 0.2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted(q, k, v, mask, masked == "causal", 0.2), **CLOSE)
    assert found.transpose(1, 2).is_contiguous()


def test_what_sees_nothing_and_what_is_no_number(way: str) -> None:
    q, k, v = heads(1, 2, 9, 40, 0), heads(1, 2, 50, 40, 1), heads(1, 2, 50, 40, 2)
    seen = torch.rand(1, 1, 9, 50) < 0.5
    seen[..., 7] = True
    seen[..., 3, :] = False
    assert not bf16_attention(q, k, v, seen)[:, :, 3].any()
    added = torch.zeros(9, 50).masked_fill(~seen[0, 0], -torch.inf)
    assert not bf16_attention(q, k, v, added)[:, :, 3].any()
    q[0, 1, 5, 2] = torch.nan
    found = bf16_attention(q, k, v)
    assert found[0, 1, 5].isnan().all() and found.isnan().sum() == 40
    q[0, 1, 5, 2], v[0, 0, 7] = 0.0, torch.inf
    assert not bf16_attention(q, k, v)[0, 0].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_least_number_hides_is_seen_alike(way: str, dtype: torch.dtype) -> None:
    q, k, v = (heads(1, 2, rows, 40, seed) for seed, rows in enumerate((9, 50, 50)))
    least = torch.zeros(9, 50).masked_fill(torch.rand(9, 50) < 0.5, torch.finfo(dtype).min)
    least[3] = torch.finfo(dtype).min
    found = bf16_attention(q, k, v, least)
    torch.testing.assert_close(found, wanted(q, k, v, least, False, 40**-0.5), **CLOSE)
    torch.testing.assert_close(found[:, :, 3], v.mean(2), **CLOSE)


def test_far_scores_are_not_lost(way: str) -> None:
    q, k, v = (50 * heads(1, 1, 33, 64, seed) for seed in range(3))
    torch.testing.assert_close(
        bf16_attention(q, k, v) / 50, wanted(q, k, v, None, False, 64**-0.5) / 50, rtol=2e-2, atol=2e-2
    )


def test_other_layouts_and_dtypes() -> None:
    q, k, v = (heads(2, 3, 17, 24, seed) for seed in range(3))
    right = bf16_attention(q, k, v)
    strided = (torch.randn(2, 3, 17, 48)[..., ::2].copy_(each) for each in (q, k, v))
    torch.testing.assert_close(bf16_attention(*strided), right, **CLOSE)
    wide = bf16_attention(q.double(), k.double(), v.double())
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide.float(), right, **CLOSE)


def test_numbers_that_are_bf16_give_the_same(way: str) -> None:
    q, k, v = (heads(2, 3, rows, 40, rows) for rows in (37, 70, 70))
    narrow = bf16_attention(*(each.bfloat16() for each in (q, k, v)))
    assert narrow.dtype is torch.float32 and torch.equal(narrow, bf16_attention(q, k, v))


@pytest.mark.skipif(fallback_reason() is not None, reason="there is no kernel here")
def test_a_mask_that_says_the_same_of_all_keys_is_read_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (heads(2, 3, 17, 24, seed) for seed in range(3))
    seen = torch.ones(2, 1, 17, 1, dtype=torch.bool)
    seen[1, 0, 4] = False
    right = wanted(q, k, v, seen.expand(2, 1, 17, 17), False, 24**-0.5)
    right[1, :, 4] = 0
    monkeypatch.setattr(module, "by_torch", None)
    torch.testing.assert_close(bf16_attention(q, k, v, seen.expand(2, 1, 17, 17)), right, **CLOSE)


@pytest.mark.parametrize("kind", ["no", "bool", "column", "same", "added"])
def test_workspace_is_what_the_allocator_hands_out(way: str, kind: str) -> None:
    """A mask of numbers that are one for all keys is written out, bools that are so are read as they lie."""
    q, k, v = heads(2, 4, 65, 40, 0), heads(2, 2, 90, 40, 1), heads(2, 2, 90, 40, 2)
    mask = {
        "bool": lambda: torch.rand(2, 1, 65, 90) < 0.6,
        "added": lambda: torch.randn(2, 4, 65, 90),
        "column": lambda: torch.randn(1, 4, 65, 1).expand(-1, -1, -1, 90),
        "same": lambda: (torch.rand(2, 1, 65, 1) < 0.7).expand(-1, -1, -1, 90),
    }.get(kind, lambda: None)()
    bf16_attention(q, k, v, mask)
    with torch_compat_memory.watched_memory("cpu") as peak:
        made = bf16_attention(q, k, v, mask)
    beside = workspace_bytes(bf16_attention.default, (q, k, v, mask))
    assert beside is not None
    assert peak() - made.nbytes <= beside
    if way == "here" and fallback_reason() is None:
        assert peak() - made.nbytes == beside


def test_operator() -> None:
    q, k, v = (heads(1, 2, 8, 16, seed) for seed in range(3))
    opcheck(bf16_attention.default, (q, k, v), test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        bf16_attention(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 8 * 8 * 16


@pytest.mark.skipif(not instructions.bf16_isas(), reason="this processor multiplies no bf16")
class TestChoice:
    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        module.kernels.cache_clear()
        yield
        module.kernels.cache_clear()

    def test_here(self) -> None:
        assert fallback_reason() is None and told() == instructions.bf16_isas()[0]

    @pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16"])
    def test_every_set_is_right(self, isa: str) -> None:
        if isa not in instructions.bf16_isas():
            pytest.skip(f"this processor has no {isa}")
        assert module.AttentionTiles(isa).objection() is None
        assert backward.BackwardTiles(isa).objection() is None

    @pytest.mark.parametrize(
        ("tells", "best", "found"),
        [
            ({}, "avx512", ()),
            ({}, "avx512_bf16", ("avx512_bf16",)),
            ({"amx_bf16": True}, "avx512_bf16", ("avx512_bf16",)),
            ({"amx_bf16": True, "avx512_vnni": True}, "avx512_bf16", ("amx_bf16", "avx512_bf16")),
            ({"amx_bf16": True, "avx512_vnni": True}, "avx2", ()),
        ],
    )
    def test_sets_by_what_torch_tells(
        self, tells: dict[str, bool], best: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: tells)
        monkeypatch.setattr(instructions, "best_isa", lambda: best)
        assert instructions.bf16_isas() == found

    def test_a_system_that_gives_no_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refused:
            permitted = staticmethod(lambda: 0)

        monkeypatch.setattr(module, "library", lambda *_: Refused())
        assert "the system does not give this process AMX's tiles" in str(fallback_reason())

    def test_a_compiler_that_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: object) -> None:
            raise LoweringError("the compiler does not know -mamx-bf16")

        monkeypatch.setattr(module, "library", refuses)
        assert "does not know" in str(fallback_reason())
        q = heads(1, 1, 4, 8, 0)
        torch.testing.assert_close(bf16_attention(q, q, q), wanted(q, q, q, None, False, 8**-0.5), **CLOSE)

    def test_wrong_kernels_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = module.kernels()
        assert not isinstance(made, str)
        right = module.AttentionTiles.attention
        monkeypatch.setattr(module.AttentionTiles, "attention", lambda *given: right(*given) * 1.05)
        assert "wrong attention" in str(made.objection())
