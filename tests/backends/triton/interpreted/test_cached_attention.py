"""Attention over a cache in the mended interpreter, against eager attention in float64 on the same numbers;
and rows appended to a cache, against torch's.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.backends.triton import cached_attention as tiled
from effcompile.ops.append import append, buffer
from effcompile.ops.cache_rows import as_codes

LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def made(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held_in(rows: Tensor, dtype: torch.dtype, room: int) -> tuple[Tensor, Tensor]:
    """Rows in a buffer of so much room whose rest is NaN (scales of codes, too); and what they stand for."""
    held = as_codes(rows) if dtype is torch.int8 else rows.to(dtype)
    batch, groups, length, width = held.shape
    whole = torch.full((batch, groups, room, width), float("nan")).to(held.dtype)
    if dtype is torch.int8:
        whole = torch.full((batch, groups, room, width // 4), float("nan")).view(torch.int8)
        wide = held[..., :-4].double() * held[..., -4:].contiguous().view(torch.float32).double()
    else:
        wide = held.double()
    whole[:, :, :length] = held
    return whole, wide


def eager(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, added: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d + added) v where it is seen, every head with keys of its own; 0 where nothing is."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query.double() @ key.mT / math.sqrt(query.shape[3])
    scores = scores if added is None else scores + added.double()
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def close(found: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found is not None and found.dtype is dtype
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-12)
    assert error <= LIMITS[dtype], float(error)


CASES = st.fixed_dictionaries(
    {
        "keys": st.integers(1, 300),
        "shared": st.sampled_from([1, 2, 4, 7]),
        "queries": st.sampled_from([1, 1, 3]),
        "padded": st.booleans(),
        "window": st.sampled_from([0, 0, 33]),
        "numbers": st.booleans(),
        "dtypes": st.sampled_from(
            [
                (torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                (torch.float32, torch.int8), (torch.float16, torch.float16),
                (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8),
            ]
        ),
        "width": st.sampled_from([16, 20]),
    }
)  # fmt: skip


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=CASES, seed=st.integers(0, 1 << 20))
def test_it_is_eager_attention_over_what_is_held(case: dict[str, object], seed: int) -> None:
    """Left padding, a window, several queries (causal among themselves), in a buffer of more room than rows:
    what is behind the rows, or seen by nobody, is NaN and stays where it is.
    """
    keys, shared, queries, width = (int(case[name]) for name in ("keys", "shared", "queries", "width"))  # type: ignore[call-overload]
    dtype, held = case["dtypes"]  # type: ignore[misc]
    queries, batch, groups = min(queries, keys), 2, 1 + seed % 2
    query = made(batch, queries, groups * shared, width, seed=seed, dtype=dtype).transpose(1, 2)
    key, exact_key = held_in(made(batch, groups, keys, width, seed=seed + 1, dtype=dtype), held, keys + 17)
    value, exact_value = held_in(
        made(batch, groups, keys, width, seed=seed + 2, dtype=dtype), held, keys + 17
    )
    place, behind = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    seen = (place <= behind)[None, None].expand(batch, 1, -1, -1).clone()
    if case["window"]:
        seen &= place > behind - int(case["window"])  # type: ignore[call-overload]
    if case["padded"]:
        seen[1] &= place >= min(keys - 1, keys // 2)
    hidden = ~seen.any(2)[:, 0]  # (B, K): rows that no query sees
    for rows in (key, value):
        view = rows.view(torch.float32) if held is torch.int8 else rows
        view[:, :, :keys].masked_fill_(hidden[:, None, :, None], float("nan"))
    exact_key, exact_value = (t.masked_fill(hidden[:, None, :, None], 0.0) for t in (exact_key, exact_value))
    added = (
        made(1, groups * shared, queries, keys, seed=seed + 3, dtype=torch.float32)
        if case["numbers"]
        else None
    )
    mask = seen if added is None else added.masked_fill(~seen, -math.inf)
    found = tiled.attend(query, key[:, :, :keys], value[:, :, :keys], mask, width**-0.5)
    close(found, eager(query, exact_key, exact_value, seen, added), dtype)


def test_without_a_mask_and_over_one_part_or_several() -> None:
    for keys in (5, 32, 97):
        query, key, value = (made(2, heads, rows, 16, seed=keys + heads, dtype=torch.float32)
                             for heads, rows in ((4, 2), (2, keys), (2, keys)))  # fmt: skip
        wanted = eager(query, key.double(), value.double(), None, None)
        close(tiled.attend(query, key, value, None, 0.25), wanted, torch.float32)


def test_a_query_that_sees_nothing_is_zero() -> None:
    query, key = (
        made(1, 2, 1, 16, seed=1, dtype=torch.float32),
        made(1, 1, 70, 16, seed=2, dtype=torch.float32),
    )
    found = tiled.attend(query, key, key, torch.zeros(1, 1, 1, 70, dtype=torch.bool), 0.25)
    assert found is not None and torch.equal(found, torch.zeros_like(found))


def test_what_it_does_not_take_is_torchs() -> None:
    """Many queries, heads that are wider than a program holds, a cache of another dtype, another mask."""
    row = lambda heads, rows, width=16, dtype=torch.float32: made(1, heads, rows, width, seed=1, dtype=dtype)  # noqa: E731
    key = row(1, 9)
    assert tiled.attend(row(2, 40), key, key, None, 1.0) is None
    assert tiled.attend(row(1, 1, 300), row(1, 9, 300), row(1, 9, 300), None, 1.0) is None
    assert tiled.attend(row(1, 1), key.double(), key.double(), None, 1.0) is None
    assert tiled.attend(row(1, 1), key, key, torch.ones(1, 1, 1, 9, dtype=torch.int64), 1.0) is None
    odd = as_codes(row(1, 9, 15))
    assert tiled.attend(row(1, 1, 15), odd, odd, None, 1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("on_the_device", [False, True])
def test_rows_are_appended_as_torch_does(dtype: torch.dtype, on_the_device: bool) -> None:
    """In a view of a buffer; a row of zeros, one with an infinity and one with NaN among them."""
    new = made(2, 4, 3, 20, seed=1, dtype=torch.float32)
    new[0, 0, 0], new[0, 1, 1, 3], new[1, 2, 2, 19] = 0.0, math.inf, math.nan
    rows = (
        new.transpose(1, 2).contiguous().transpose(1, 2)
    )  # heads behind tokens, as a projection leaves them
    kept = as_codes(new[:, :, :2]) if dtype is torch.int8 else new[:, :, :2].to(dtype)
    past = append(buffer(kept, 9), kept, 9)
    wanted = torch.cat([kept, as_codes(new) if dtype is torch.int8 else new.to(dtype)], 2)
    longer = past.as_strided((2, 4, 5, past.shape[3]), past.stride())
    assert tiled.write(longer, rows, torch.tensor(2) if on_the_device else 2)
    if dtype is torch.int8:
        assert torch.equal(longer[..., :-4], wanted[..., :-4])
        longer, wanted = (t[..., -4:].contiguous().view(torch.float32) for t in (longer, wanted))
    torch.testing.assert_close(longer, wanted, rtol=0, atol=0, equal_nan=True)
