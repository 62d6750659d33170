"""Scales of columns and codes that are lowered: the product is what it was, and in bytes nearer to that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.ops.byte_codings import Coding, coding


def rows_in_bytes(x: Tensor) -> Tensor:
    """Each row to 255 numbers, by numpy's rounding."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.from_numpy((x / scale).numpy().round()) * scale


def lowered_rows(x: Tensor) -> Tensor:
    """The same of those that lie in the range of the row and 0."""
    least, most = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (most - least).clamp(min=1e-30) / 253
    return torch.from_numpy((x / scale).numpy().round()) * scale


def columns_of(how: Coding | None, k: int) -> Tensor:
    assert how is not None
    return torch.ones(k) if how.columns is None else how.columns


def plain(k: int) -> Coding:
    return Coding(torch.zeros(k))


def off(x: Tensor, weight: Tensor, how: Coding) -> Tensor:
    """By how much of itself each row of the product is off."""
    right, columns = x.double() @ weight.double().T, columns_of(how, x.shape[1])
    coded = (rows_in_bytes if how.columns is None else lowered_rows)(x * columns)
    found = coded.double() @ rows_in_bytes(weight / columns).double().T
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
    columns = columns_of(coding(x, weights), k)
    assert columns.shape == (k,)
    assert float(columns.max()) == 1
    assert float(columns.min()) > 0
    for weight in weights:
        right = x.double() @ weight.double().T
        made = (x * columns).double() @ (weight / columns).double().T
        size_of = (x.abs().double() @ weight.abs().double().T).clamp(min=1e-300)
        assert float(((made - right).abs() / size_of).max()) < 1e-6


def test_columns_that_stand_out_are_made_smaller() -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=drawn), torch.randn(48, 96, generator=drawn)
    x[:, 7] *= 60
    found = coding(x, [weight])
    assert found is not None
    assert int(columns_of(found, 96).argmin()) == 7
    before, after = off(x, weight, plain(96)), off(x, weight, found)
    assert float(after.square().mean().sqrt()) < 0.5 * float(before.square().mean().sqrt())


def test_the_row_that_stands_out_counts_as_much_as_any() -> None:
    """A token with the largest columns, and of the third weight with values of few hundredths."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=drawn)
    x[0, :2] = 80
    weights = [torch.randn(48, 96, generator=drawn) for _ in range(3)]
    weights[2][:, :2] = 1e-3
    found = coding(x, weights)
    assert found is not None
    alone = (weights[2].abs().amax(0) / x.abs().amax(0)).sqrt()
    error = lambda how: sum(float(off(x, w, how).square().mean()) for w in weights)  # noqa: E731
    assert error(found) < 0.7 * error(plain(96))
    assert error(found) < 1.1 * error(Coding(x.mean(0), alone / alone.max()))
    assert float(off(x, weights[2], found)[0]) < 0.5 * float(off(x, weights[2], plain(96))[0])


@pytest.mark.parametrize(("function", "lowered"), [(F.gelu, True), (F.relu, True), (torch.tanh, False)])
def test_what_a_gelu_makes_is_lowered(function: Callable[[Tensor], Tensor], lowered: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    x = function(2 * torch.randn(64, 96, generator=drawn))
    weight = torch.randn(48, 96, generator=drawn)
    found = coding(x, [weight])
    assert found is not None
    assert (found.columns is not None) == lowered
    if lowered:
        before, after = off(x, weight, plain(96)), off(x, weight, found)
        assert float(after.square().mean()) < 0.8 * float(before.square().mean())


def test_the_bias_takes_what_rounding_adds_on_average() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(400, 96, generator=drawn) + 2
    weight = torch.randn(48, 96, generator=drawn)
    how = coding(x, [weight])
    assert how is not None
    columns = columns_of(how, 96)
    rounded = rows_in_bytes(weight / columns)
    left = x @ weight.T - (x * columns) @ rounded.T
    assert float(left.mean(0).norm()) > 0.05
    corrected = left - how.correction(weight, rounded)
    assert float(corrected.mean(0).norm()) < 1e-3 * float(left.mean(0).norm())


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_has_none(number: float) -> None:
    x, weight = torch.randn(4, 8), torch.randn(4, 8)
    x[1, 1] = number
    assert coding(x, [weight]) is None
    x[1, 1], weight[1, 1] = 1, number
    assert coding(x, [weight]) is None


def test_nothing_is_made_of_nothing() -> None:
    assert coding(torch.empty(0, 8), [torch.randn(4, 8)]) is None
    of_zeros = coding(torch.zeros(4, 8), [torch.zeros(4, 8)])
    assert of_zeros is not None
    assert of_zeros.columns is None
