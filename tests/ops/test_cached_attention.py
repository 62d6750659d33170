"""Attention of few queries over a cache, against the definition in float64 with keys and values repeated for
each query's head.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.machine import instructions, native
from effcompile.ops import cached_attention as op
from effcompile.ops.cache_rows import as_numbers, into
from effcompile.ops.cached_attention import cached_attention

#: Tiles multiply numbers of 16 bits: what is left of them in 900 keys' sums, 2e-5 of 600 draws at the most.
ATOL = 4e-5
#: Floats that are watched behind a scratch.
BEHIND = 4096
MASKS = ("no", "shared", "by head", "numbers")


@pytest.fixture(params=["here", *op.isas(), "by torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has, and none."""
    if request.param == "by torch":
        monkeypatch.setattr(op, "kernels", lambda: "asked for")
    elif request.param != "here":
        made = op.AttentionKernels(request.param)
        monkeypatch.setattr(op, "kernels", lambda: made)
    return str(request.param)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    k, v = (side if side.dtype.is_floating_point else as_numbers(side) for side in (k, v))
    k, v = (side.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for side in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


def drawn(
    batch: int, groups: int, shared: int, rows: int, keys: int, width: int, masked: str,
    dtype: torch.dtype, of_values: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Queries as a projection lays them, keys and values as a cache's rows lie in its buffer."""
    made = torch.Generator().manual_seed(keys * width)
    q = torch.randn(batch, rows, groups * shared, width, generator=made).transpose(1, 2)
    wide = torch.randn(2, batch, groups, keys + 9, width, generator=made)
    buffers = [
        into(rows, kind).to(kind) for rows, kind in zip(wide, (dtype, of_values or dtype), strict=True)
    ]
    mask = torch.rand(batch, groups * shared if masked == "by head" else 1, rows, keys, generator=made) > 0.4
    mask[..., 0] = True
    numbers = torch.randn(batch, 1, rows, keys, generator=made)
    return (
        q,
        buffers[0][:, :, 2 : 2 + keys],
        buffers[1][:, :, 2 : 2 + keys],
        {"no": None, "numbers": numbers}.get(masked, mask),
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2), groups=st.integers(1, 3), shared=st.integers(1, 4), rows=st.integers(1, 9),
    keys=st.integers(1, 300), width=st.integers(1, 140), masked=st.sampled_from(MASKS),
    dtype=st.sampled_from([*op.FORMS]), of_values=st.sampled_from([*op.FORMS]), threads=st.integers(1, 2),
)  # fmt: skip
def test_any_shape(
    batch: int,
    groups: int,
    shared: int,
    rows: int,
    keys: int,
    width: int,
    masked: str,
    dtype: torch.dtype,
    of_values: torch.dtype,
    threads: int,
) -> None:
    width += width % 2 and torch.uint8 in (dtype, of_values)
    q, k, v, mask = drawn(batch, groups, shared, rows, keys, width, masked, dtype, of_values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cached_attention(q, k, v, mask, width**-0.5)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), by_hand(q, k, v, mask, width**-0.5), rtol=1e-4, atol=ATOL)


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize(
    ("dtype", "of_values"),
    [(torch.float32, torch.uint8), (torch.bfloat16, torch.float32), (torch.uint8, torch.int8)],
)
def test_every_instruction_set(isa: str, dtype: torch.dtype, of_values: torch.dtype, masked: str) -> None:
    for shape in ((2, 2, 3, 1, 75, 20), (1, 4, 1, 3, 130, 64), (2, 1, 7, 1, 7, 4), (1, 1, 3, 2, 70, 128)):
        q, k, v, mask = drawn(*shape, masked, dtype, of_values)
        torch.testing.assert_close(
            cached_attention(q, k, v, mask, None).double(),
            by_hand(q, k, v, mask, shape[5] ** -0.5),
            rtol=1e-4,
            atol=ATOL,
        )


@settings(max_examples=40, deadline=None)
@given(
    shared=st.integers(1, 7), keys=st.integers(1, 200), half=st.integers(1, 70),
    forms=st.tuples(*[st.sampled_from([torch.bfloat16, torch.int8, torch.uint8])] * 2),
)  # fmt: skip
def test_narrow_rows_are_read_as_what_they_stand_for(
    shared: int, keys: int, half: int, forms: tuple[torch.dtype, torch.dtype]
) -> None:
    """To the bit what the kernel gives for them in fp32, where no tiles multiply."""
    q, k, v, _ = drawn(2, 2, shared, 1, keys, 2 * half, "no", *forms)
    wide = [each.float() if each.dtype.is_floating_point else as_numbers(each) for each in (k, v)]
    if isinstance(op.kernels(), str):
        found, wanted = (cached_attention(q, *each, None, 0.3) for each in ((k, v), wide))
    else:
        kernels = op.AttentionKernels(instructions.integer_isas()[0])
        found, wanted = (kernels.attention(q, *each, None, 0.3) for each in ((k, v), wide))
    assert torch.equal(found, wanted)


NARROW = (torch.bfloat16, torch.int8, torch.uint8)


@pytest.mark.skipif("amx_bf16" not in op.isas(), reason="this processor has no tiles")
@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 2), shared=st.integers(1, 9), rows=st.integers(1, 3), keys=st.integers(1, 900),
    width=st.sampled_from([32, 64, 96, 128]), masked=st.sampled_from(MASKS),
    forms=st.tuples(*[st.sampled_from(NARROW)] * 2), threads=st.integers(1, 2),
)  # fmt: skip
def test_tiles(
    groups: int, shared: int, rows: int, keys: int, width: int, masked: str,
    forms: tuple[torch.dtype, torch.dtype], threads: int,
) -> None:  # fmt: skip
    """Rows that are narrower are multiplied by tiles to 16 bits, not to bf16's eight: twenty times nearer."""
    q, k, v, mask = drawn(1, groups, shared, rows, keys, width, masked, *forms)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = op.AttentionKernels("amx_bf16").attention(q, k, v, mask, width**-0.5)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), by_hand(q, k, v, mask, width**-0.5), rtol=1e-4, atol=ATOL)


@pytest.mark.skipif(not op.isas(), reason="no kernel runs here")
@settings(max_examples=30, deadline=None)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    rows=st.integers(1, 8),
    keys=st.integers(1, 600),
    width=st.sampled_from((8, 16, 40, 64, 96, 128)),
    forms=st.tuples(st.sampled_from(list(op.FORMS)), st.sampled_from(list(op.FORMS))),
    isa=st.sampled_from(op.isas() or ("none",)),
)
def test_nothing_is_written_behind_the_scratch(
    heads: tuple[int, int], rows: int, keys: int, width: int, forms: tuple[torch.dtype, torch.dtype], isa: str
) -> None:
    q, k, v, _ = drawn(1, *heads, rows, keys, width, "no", *forms)
    made, untouched = op.AttentionKernels(isa), list[bool]()
    run, floats = made.call, op.scratch_floats

    def watched(*given: Any) -> None:
        behind = (ctypes.c_float * BEHIND).from_address(given[14] + 4 * wanted[0])
        behind[:] = [3.0] * BEHIND
        run(*given)
        untouched.append(list(behind) == [3.0] * BEHIND)

    wanted = list[int]()

    def longer(*given: Any, **how: Any) -> int:
        wanted.append(floats(*given, **how))
        return wanted[0] + BEHIND

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "scratch_floats", longer)
        made.call = watched
        made.attention(q, k, v, None, 0.3)
    assert untouched == [True]


@pytest.mark.parametrize("dtype", op.FORMS)
def test_spans_are_the_same_for_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    """Of one head of keys, of which threads take parts; rows that see nothing of a span, too."""
    q, k, v, _ = drawn(1, 1, 5, 1, 1100, 64, "no", dtype)
    mask = torch.ones(1, 5, 1, 1100, dtype=torch.bool)
    mask[:, 1, :, :600], mask[:, 2] = False, False
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cached_attention(q, k, v, mask, 0.3))
    finally:
        torch.set_num_threads(before)
    if isa != "by torch":
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    seen = [0, 1, 3, 4]
    wanted = by_hand(q, k, v, mask, 0.3)[:, seen]
    torch.testing.assert_close(found[0][:, seen].double(), wanted, rtol=1e-4, atol=ATOL)
    assert not found[0][:, 2].any()


def test_a_query_that_is_not_a_number_is_none_behind(isa: str) -> None:
    """All of its scores are NaN, none is the largest: its result was 0."""
    q, k, v, _ = drawn(1, 2, 3, 1, 300, 64, "no", torch.float32)
    q = q.clone()
    q[0, 4] = torch.nan
    found = cached_attention(q, k, v, None, 0.3)
    assert found[0, 4].isnan().all() and found[0, :4].isfinite().all() and found[0, 5].isfinite().all()


def test_what_is_hidden_is_not_read(isa: str) -> None:
    """Not even a value that is not finite; one that is seen makes its row so, and no other."""
    q, k, v, mask = drawn(2, 1, 2, 1, 40, 16, "shared", torch.float32)
    wanted = cached_attention(q, k, v, mask, 0.3)
    assert mask is not None
    k, v = k.clone(), v.clone()
    k[0, 0][~mask[0, 0, 0]] = 1e30
    torch.testing.assert_close(cached_attention(q, k, v, mask, 0.3), wanted)
    k[1, 0, 0, 3] = torch.nan
    found = cached_attention(q, k, v, mask, 0.3)
    assert found[1].isnan().all() and torch.equal(
        found[0].isnan(), torch.zeros_like(found[0], dtype=torch.bool)
    )


def test_a_row_that_sees_nothing_is_torchs() -> None:
    q, k, v, mask = drawn(2, 2, 2, 3, 20, 8, "shared", torch.float32)
    assert mask is not None
    mask[1, 0, 1] = False
    torch.testing.assert_close(
        cached_attention(q, k, v, mask, 0.3), op.by_torch(q, k, v, mask, 0.3), equal_nan=True
    )


@pytest.mark.skipif("avx2" not in instructions.integer_isas(), reason="this processor has no AVX2")
def test_wrong_kernels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = op.AttentionKernels("avx2")
    right = op.AttentionKernels.attention
    assert made.objection() is None
    monkeypatch.setattr(op.AttentionKernels, "attention", lambda *arguments: right(*arguments) * 1.01)
    assert "wrong attention" in str(made.objection())


@pytest.mark.parametrize(
    "name",
    [
        isa
        for isa in sorted(op.WIDTHS)
        if isa != "generic" and isa.startswith("neon") == instructions.on_arm()
    ],
)
def test_every_instruction_set_compiles(name: str) -> None:
    if isinstance(op.kernels(), str):
        pytest.skip("there is no compiler, or this processor has no such kernels")
    assert native.compiled(op._SOURCE, {"WIDTH": op.WIDTHS[name]}, name).exists()
