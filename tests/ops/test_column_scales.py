"""Scales of columns: the product is what it was, and in bytes nearer to that where columns differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.ops.column_scales import column_scales


def rows_in_bytes(x: Tensor) -> Tensor:
    """Each row to 255 numbers, by numpy's rounding."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.from_numpy((x / scale).numpy().round()) * scale


def off(x: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """By how much of itself each row of the product is off."""
    right = x.double() @ weight.double().T
    found = rows_in_bytes(x * columns).double() @ rows_in_bytes(weight / columns).double().T
    return (found - right).norm(dim=1) / right.norm(dim=1)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 70),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    hidden=st.booleans(),
)
def test_the_product_stays_what_it_is(
    m: int, k: int, counts: list[int], seed: int, spread: float, hidden: bool
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    size = (torch.randn(k, generator=drawn) * spread).exp()
    x = torch.randn(m, k, generator=drawn) * size
    weights = [torch.randn(n, k, generator=drawn) for n in counts]
    if hidden:
        x[:, 0] = 0
        weights[0][:, -1] = 0
    columns = column_scales(x, weights)
    if columns is None:
        return
    assert columns.shape == (k,)
    assert float(columns.max()) == 1
    assert float(columns.min()) > 0
    for weight in weights:
        right = x.double() @ weight.double().T
        found = (x * columns).double() @ (weight / columns).double().T
        size_of = (x.abs().double() @ weight.abs().double().T).clamp(min=1e-300)
        assert float(((found - right).abs() / size_of).max()) < 1e-6


def test_columns_that_stand_out_are_made_smaller() -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=drawn), torch.randn(48, 96, generator=drawn)
    x[:, 7] *= 60
    columns = column_scales(x, [weight])
    assert columns is not None
    assert int(columns.argmin()) == 7
    before, after = off(x, weight, torch.ones(96)), off(x, weight, columns)
    assert float(after.square().mean().sqrt()) < 0.5 * float(before.square().mean().sqrt())


def test_the_row_that_stands_out_counts_as_much_as_any() -> None:
    """A token with the largest columns, and of the third weight with values of few hundredths."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=drawn)
    x[0, :2] = 80
    weights = [torch.randn(48, 96, generator=drawn) for _ in range(3)]
    weights[2][:, :2] = 1e-3
    columns = column_scales(x, weights)
    assert columns is not None
    alone = (weights[2].abs().amax(0) / x.abs().amax(0)).sqrt()
    error = lambda c: sum(float(off(x, w, c).square().mean()) for w in weights)  # noqa: E731
    assert error(columns) < 0.7 * error(torch.ones(96))
    assert error(columns) < 1.1 * error(alone / alone.max())
    assert float(off(x, weights[2], columns)[0]) < 0.5 * float(off(x, weights[2], torch.ones(96))[0])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_has_none(number: float) -> None:
    x, weight = torch.randn(4, 8), torch.randn(4, 8)
    x[1, 1] = number
    assert column_scales(x, [weight]) is None
    x[1, 1], weight[1, 1] = 1, number
    assert column_scales(x, [weight]) is None


def test_nothing_is_made_of_nothing() -> None:
    assert column_scales(torch.empty(0, 8), [torch.randn(4, 8)]) is None
    assert column_scales(torch.zeros(4, 8), [torch.zeros(4, 8)]) is None
