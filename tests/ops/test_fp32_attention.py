"""Our attention in fp32: as torch has it, whatever shape, layout, mask and threads, to fp32's rounding."""

from __future__ import annotations

import functools
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
from effcompile.ops import fp32_attention as module
from effcompile.ops.fp32_attention import (
    AttentionRows,
    HeldAttention,
    fallback_reason,
    fp32_attention,
    isas,
    told,
)
from effcompile.ops.tape import Tape, TapeStep
from effcompile.ops.workspace import workspace_bytes

close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-6)
needs_kernel = pytest.mark.skipif(fallback_reason() is not None, reason="there is no kernel here")


@pytest.fixture(params=["here", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by torch":
        monkeypatch.setattr(module, "kernels", lambda: "asked for")
    return str(request.param)


def drawn_heads(heads: int, groups: int, rows: tuple[int, int, int], widths: tuple[int, int], seed: int):  # type: ignore[no-untyped-def]
    """q, k, v; q and k views of one tensor, as a merged linear makes them, where they may be."""
    batch, queries, keys = rows
    drawn = torch.Generator().manual_seed(seed)
    apart = torch.randn(batch, max(queries, keys), heads + groups, widths[0], generator=drawn)
    v = torch.randn(batch, keys, groups, widths[1], generator=drawn).transpose(1, 2)
    q, k = apart.split((heads, groups), 2)
    return q[:, :queries].transpose(1, 2), k[:, :keys].transpose(1, 2), v


def wanted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """In fp64."""
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    made = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask, is_causal=causal, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return made.float()


def band(queries: int, keys: int, wide: int) -> Tensor:
    """Keys of a window of |wide| about the diagonal, or after it; some rows see none."""
    apart = torch.arange(keys) - torch.arange(queries)[:, None] * 3
    return apart.abs() <= wide if wide >= 0 else apart >= -wide


def masks(kind: str, shape: tuple[int, int, int, int], seed: int) -> Tensor | None:
    batch, heads, queries, keys = shape
    drawn = torch.Generator().manual_seed(seed)
    return {
        "bool": lambda: torch.rand(batch, 1, queries, keys, generator=drawn) < 0.6,
        "row": lambda: torch.rand(batch, 1, 1, keys, generator=drawn) < 0.6,
        "plane": lambda: torch.rand(queries, keys, generator=drawn) < 0.6,
        "column": lambda: torch.randn(1, heads, queries, 1, generator=drawn).expand(-1, -1, -1, keys),
        "same": lambda: (torch.rand(batch, 1, queries, 1, generator=drawn) < 0.7).expand(-1, -1, -1, keys),
        "numbers": lambda: torch.randn(1, heads, queries, keys, generator=drawn),
        "window": lambda: band(queries, keys, seed),
        "padded": lambda: (torch.arange(keys) < torch.tensor([[keys - seed % keys]] * batch))[:, None, None],
        "left": lambda: torch.zeros(queries, keys).masked_fill(~band(queries, keys, -seed), -torch.inf),
        "least": lambda: (
            torch.finfo(torch.float32).min * (torch.rand(batch, 1, 1, keys, generator=drawn) < 0.5).float()
        ),
    }.get(kind, lambda: None)()


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shared=st.integers(1, 3),
    rows=st.tuples(st.integers(1, 120), st.one_of(st.integers(1, 150), st.integers(500, 1100))),
    widths=st.tuples(st.integers(1, 100), st.one_of(st.integers(1, 100), st.sampled_from([16, 32, 64, 128]))),
    masked=st.sampled_from(
        [
            "no",
            "bool",
            "row",
            "plane",
            "column",
            "same",
            "numbers",
            "least",
            "causal",
            "window",
            "padded",
            "left",
        ]
    ),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_torch(
    batch: int,
    groups: int,
    shared: int,
    rows: tuple[int, int],
    widths: tuple[int, int],
    masked: str,
    threads: int,
    seed: int,
) -> None:
    heads = groups * shared
    q, k, v = drawn_heads(heads, groups, (batch, *rows), widths, seed)
    mask, causal = masks(masked, (batch, heads, *rows), seed), masked == "causal"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = fp32_attention(q, k, v, mask, causal, 0.2)
    finally:
        torch.set_num_threads(before)
    close(found, wanted(q, k, v, mask, causal, 0.2))
    assert found.transpose(1, 2).is_contiguous()


@needs_kernel
@pytest.mark.parametrize("isa", isas())
def test_every_set_is_right_at_every_rest(isa: str) -> None:
    kernels = AttentionRows(isa)
    assert kernels.objection() is None
    for at in range(1, 36):
        q, k, v = drawn_heads(2, 1, (1, at, 3 * at), (at, 37 - at), at)
        mask = masks(("bool", "numbers", "no")[at % 3], (1, 2, at, 3 * at), at)
        seen = mask if mask is None else mask.expand(1, -1, -1, -1)
        found = kernels.attention(q, k, v, seen, at % 5 == 0, 0.3)
        both = mask
        if at % 5 == 0:
            hidden = torch.ones(at, 3 * at, dtype=torch.bool).triu(1)
            both = torch.zeros(1, 1, at, 3 * at) if mask is None else mask
            both = (both & ~hidden) if both.dtype is torch.bool else both.masked_fill(hidden, -torch.inf)
        close(found, wanted(q, k, v, both, False, 0.3))


def test_what_sees_nothing(way: str) -> None:
    q, k, v = drawn_heads(2, 2, (1, 9, 600), (40, 48), 0)
    seen = torch.rand(1, 1, 9, 600) < 0.5
    seen[..., 7] = True
    seen[..., 3, :] = False
    seen[..., 4, :520] = False  # all of the first block of keys
    right = wanted(q, k, v, seen, False, 40**-0.5)
    assert not right[:, :, 3].any()
    close(fp32_attention(q, k, v, seen), right)
    added = torch.zeros(9, 600).masked_fill(~seen[0, 0], -torch.inf)
    close(fp32_attention(q, k, v, added), right)
    least = torch.full((9, 600), torch.finfo(torch.float32).min)  # all keys are the same then
    close(fp32_attention(q, k, v, least), v.mean(2, keepdim=True).expand(-1, -1, 9, -1))


@pytest.mark.parametrize("kind", ["no", "bool", "numbers"])
def test_what_is_no_number_is_none_where_it_is_by_torch(kind: str) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for at in range(3):
            tensors = drawn_heads(2, 2, (1, 21, 40), (32, 32), at)
            mask = masks(kind, (1, 2, 21, 40), 1)
            tensors[at][0, 1, 5, 2] = value
            q, k, v = tensors
            found, right = fp32_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
            assert torch.equal(found.isfinite(), right.isfinite())
            close(found, right, equal_nan=True)


def test_far_scores_are_not_lost(way: str) -> None:
    q, k, v = (50 * each for each in drawn_heads(1, 1, (1, 33, 700), (64, 64), 0))
    close(fp32_attention(q, k, v) / 50, wanted(q, k, v, None, False, 64**-0.5) / 50, rtol=1e-3, atol=1e-3)


def test_other_layouts_and_dtypes() -> None:
    q, k, v = drawn_heads(3, 3, (2, 17, 17), (24, 24), 0)
    right = wanted(q, k, v, None, False, 24**-0.5)
    strided = [torch.randn(2, 3, 17, 48)[..., ::2].copy_(each) for each in (q, k, v)]
    torch.testing.assert_close(fp32_attention(*strided), right)
    wide = fp32_attention(q.double(), k.double(), v.double())
    assert wide.dtype is torch.float64
    close(wide.float(), right)
    close(fp32_attention(q, k, v, torch.zeros(17, 17).t()), right)
    assert fp32_attention(q[:, :, :0], k, v).shape == (2, 3, 0, 24)


def test_keys_of_all_batches_with_values_of_each() -> None:
    """And the other way round: what was laid for one batch's head is not taken for the next one's."""
    q, k, v = drawn_heads(1, 1, (3, 17, 17), (24, 20), 0)
    for keys, values in ((k[:1].expand(3, -1, -1, -1), v), (k, v[:1].expand(3, -1, -1, -1))):
        close(fp32_attention(q, keys, values), wanted(q, keys, values, None, False, 24**-0.5))


@pytest.mark.parametrize("widths", [(40, 40), (32, 64)])
@pytest.mark.parametrize("keys", [90, 600])
@pytest.mark.parametrize("kind", ["no", "bool", "column", "same"])
def test_workspace_is_what_the_allocator_hands_out(
    way: str, widths: tuple[int, int], keys: int, kind: str
) -> None:
    q, k, v = drawn_heads(4, 2, (2, 65, keys), widths, 0)
    mask = masks(kind, (2, 4, 65, keys), 0)
    fp32_attention(q, k, v, mask)
    with torch_compat_memory.watched_memory("cpu") as peak:
        made = fp32_attention(q, k, v, mask)
    beside = workspace_bytes(fp32_attention.default, (q, k, v, mask))
    assert beside is not None
    assert peak() - made.nbytes <= beside
    if way == "here" and fallback_reason() is None:
        assert peak() - made.nbytes == beside


def test_operator() -> None:
    q, k, v = drawn_heads(2, 2, (1, 8, 8), (16, 16), 0)
    opcheck(fp32_attention.default, (q, k, v), test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        fp32_attention(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 8 * 8 * 16


@needs_kernel
class TestWhichKernel:
    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        module.kernels.cache_clear()
        yield
        module.kernels.cache_clear()

    def test_here(self) -> None:
        assert told() == isas()[0]

    @pytest.mark.parametrize(
        ("best", "found"),
        [("avx512_bf16", ("avx512", "avx2")), ("avx2", ("avx2",)), ("neon", ("neon",)), ("generic", ())],
    )
    def test_sets(self, best: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "best_isa", lambda: best)
        assert isas() == found

    def test_a_compiler_that_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: object) -> None:
            raise LoweringError("the compiler does not know -mavx512f")

        monkeypatch.setattr(module, "library", refuses)
        assert "does not know" in str(fallback_reason())
        q, k, v = drawn_heads(1, 1, (1, 4, 5), (8, 8), 0)
        close(fp32_attention(q, k, v), wanted(q, k, v, None, False, 8**-0.5))

    def test_wrong_kernels_are_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(AttentionRows, "attention", lambda self, q, k, v, *_: q[..., :1] + v[:1, :1, :1])
        assert "wrong attention" in str(fallback_reason())


def test_heads_that_lie_side_by_side_are_read_so() -> None:
    held = HeldAttention(6, 2, 16, 8, False, 0.3)
    alone, hidden = Tape([TapeStep(held, (0, 1, 2))], 3, [3]), Tape([TapeStep(held, (0, 1, 2, 3))], 4, [4])
    for batch, rows in ((2, 9), (2, 9), (1, 30), (2, 9)):
        given = torch.randn(batch, rows, 200)
        parts = given[..., :96], given[..., 100:132], given[..., 140:156]
        heads = [
            part.unflatten(2, (-1, width)).transpose(1, 2)
            for part, width in zip(parts, (16, 16, 8), strict=True)
        ]
        seen = torch.rand(batch, 1, rows, rows) > 0.3
        for mask in (
            None,
            seen,
            seen[:1],
            seen[..., :1].expand(seen.shape),
            seen.float(),
            seen.mT,
            seen[0, 0],
        ):
            wanted = fp32_attention(*heads, mask, False, 0.3).transpose(1, 2).flatten(2)
            found = alone(*parts) if mask is None else hidden(*parts, mask)
            assert torch.equal(found[0], wanted)
