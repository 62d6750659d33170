"""Rows of a cache in 8 bits against a loop over numbers, and what the kernels read of them."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from effcompile.ops.append import append, buffer
from effcompile.ops.cache_rows import SCALE, as_codes, as_numbers
from effcompile.ops.cached_attention import by_torch, cached_attention

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_each_number_is_within_half_a_step(row: list[float]) -> None:
    found, most = as_numbers(as_codes(torch.tensor([row])))[0].tolist(), max(map(abs, row))
    assert all(abs(one - right) <= most / 127 * 0.5001 + 1e-30 for one, right in zip(found, row, strict=True))


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
