"""Rows of a cache in 8 and in 4 bits against a loop over numbers, and what the kernels write and read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effcompile.ops import row_program
from effcompile.ops.append import append, buffer
from effcompile.ops.cache_rows import SCALE, as_codes, as_numbers, as_pairs, held_width, into
from effcompile.ops.cached_attention import by_torch, cached_attention

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_each_number_is_within_half_a_step(row: list[float]) -> None:
    found, most = as_numbers(as_codes(torch.tensor([row])))[0].tolist(), max(map(abs, row))
    assert all(abs(one - right) <= most / 127 * 0.5001 + 1e-30 for one, right in zip(found, row, strict=True))


def in_4_bits(group: list[float]) -> list[float]:
    top = max(group, key=lambda x: (abs(x), x))
    scale = torch.tensor(top / -8).bfloat16().item() if abs(top) > 1e-30 else 0.0
    return [min(max(round(x / scale), -8), 7) * scale if scale else 0.0 for x in group]


@given(st.lists(NUMBERS, min_size=1, max_size=40).map(lambda row: row * 2))
def test_pairs_are_each_group_by_itself(row: list[float]) -> None:
    """A quotient in fp32 that is half way goes either way."""
    held = as_pairs(torch.tensor([row]))
    wanted = [number for at in range(0, len(row), 32) for number in in_4_bits(row[at : at + 32])]
    found = as_numbers(held)[0].tolist()
    assert held.shape == (1, len(row) // 2 + 2 * math.ceil(len(row) / 32))
    for at, (one, right) in enumerate(zip(found, wanted, strict=True)):
        most = max(map(abs, row[at // 32 * 32 : at // 32 * 32 + 32]))
        assert one == right or abs(abs(one - right) - most / 8) <= 0.01 * most


def test_pairs_lie_in_halves_of_their_group() -> None:
    held = as_pairs(torch.tensor([[-8.0, 1.0, 2.0, 7.0], [0.0] * 4, [math.inf, 0.0, 0.0, 0.0]]))
    assert held[0].tolist() == [0 | 10 << 4, 9 | 15 << 4, 0x80, 0x3F]  # scale 1
    assert not as_numbers(held)[1].any() and as_numbers(held)[2].isnan().all()


@pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@given(data=st.data())
def test_what_is_appended_in_c_is_what_torch_appends(dtype: torch.dtype, data: st.DataObject) -> None:
    """To the bit, whatever the numbers: also those that are none."""
    heads, width = data.draw(st.integers(1, 2)), 2 * data.draw(st.integers(1, 40))
    some = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=6))
    scale = data.draw(st.sampled_from([1.0, 1e-31, 1e30]))
    rows = torch.randn(2, 3, heads * width, generator=torch.Generator().manual_seed(len(some))) * scale
    rows.view(-1)[::7][: len(some)] = torch.tensor(some)[: rows.numel() // 7 + 1]
    apart = rows.unflatten(2, (heads, width)).transpose(1, 2)
    cache = torch.zeros(2, heads, 3, held_width(width, dtype), dtype=dtype)
    step = row_program.RowStep(kind=row_program.APPEND, a=0, b=0, out=-1, n=heads, k=width)
    row_program.RowProgram([step], 1, [heads * width], [])(rows, caches=[cache])
    assert torch.equal(cache, into(apart, dtype))


def test_a_row_is_its_codes_and_their_scale() -> None:
    held = as_codes(
        torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0], [1.0, math.inf, 0.0], [math.nan, 0.0, 0.0]])
    )
    assert held.shape == (4, 3 + SCALE) and held[0, :3].tolist() == [64, -127, 32]
    found = as_numbers(held)
    assert not found[1].any() and found[2:].isnan().all()


def test_appended_rows_are_codes_and_attention_reads_them() -> None:
    torch.manual_seed(0)
    rows, query = torch.randn(2, 2, 70, 20), torch.randn(2, 6, 1, 20)
    held = buffer(torch.empty(2, 2, 0, 20 + SCALE, dtype=torch.int8), 80)
    for at in range(0, 70, 14):
        held = append(held, rows[:, :, at : at + 14], 80)
    assert torch.equal(held, as_codes(rows)) and held.untyped_storage().nbytes() == 2 * 2 * 80 * 24
    wide = as_numbers(held)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, wide, wide, enable_gqa=True)
    for found in (cached_attention(query, held, held, None, None), by_torch(query, held, held, None, None)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_one_row_is_read_wherever_its_scale_stands() -> None:
    """Its scale need not lie at a multiple of four bytes: torch refuses such a view."""
    assert as_numbers(as_codes(torch.tensor([[2.0]]))).tolist() == [[2.0]]
    assert as_numbers(as_pairs(torch.tensor([[2.0, 0.5]]))).tolist() == [[2.0, 0.5]]
