"""Linears in fp32 by our kernel against torch's in fp64, alone and as a step of a tape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.core.errors import UsageError
from effcompile.ops import fp32_linear as ours
from effcompile.ops.int8_codes import AFTER, followed
from effcompile.ops.tape import Tape, TapeStep

linear, pack = torch.ops.effcompile.fp32_linear, torch.ops.effcompile.fp32_pack


def right(x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none") -> Tensor:
    wide = None if bias is None else bias.double()
    return followed(F.linear(x.double(), weight.double(), wide), after)


def close(found: Tensor, wanted: Tensor, before: Tensor | None = None) -> None:
    """`before`: what a GELU is of, whose polynomial is right to a share of that."""
    of = wanted if before is None else before
    largest = float(of.nan_to_num().abs().max()) if of.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6 * largest, equal_nan=True)


SIZES = st.integers(1, 300)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(1, 1700), SIZES, st.sampled_from(AFTER), st.integers(1, 3))
def test_any_shape(m: int, k: int, n: int, after: str, threads: int) -> None:
    """Rows of several chunks, parts of K, panels that are not whole."""
    torch.manual_seed(m * k + n)
    x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n) if n % 2 else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, product = linear(x, pack(weight), n, bias, after), right(x, weight, bias)
        close(found, followed(product, after), product)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cache", [0, 1 << 19])
def test_rows_in_several_chunks(cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a core with little cache."""
    monkeypatch.setattr(ours, "l2_bytes", lambda: cache)
    x, weight = torch.randn(3 * 64 + 5, 800), torch.randn(70, 800)
    close(linear(x, pack(weight), 70), right(x, weight, None))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_with_what_is_no_number_is_so_alone(odd: float) -> None:
    x, weight = torch.randn(20, 70), torch.randn(33, 70)
    x[3, 69] = odd
    found = linear(x, pack(weight), 33)
    assert not found[3].isfinite().any() and found[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("after", ["silu", "gelu_tanh", "gelu", "relu"])
def test_what_follows_a_number_far_below_zero_is_zero(after: str) -> None:
    """An exponential that ends at 2^-100 made -0.8 of -1e30; of -inf no number, as torch."""
    x = torch.tensor([-math.inf, -3e38, -1e30, -1e20, -200.0, -70.0, -60.0])[:, None]
    weight = torch.ones(20, 1)
    found = linear(x, pack(weight), 20, None, after)
    torch.testing.assert_close(
        found, followed(F.linear(x, weight), after), rtol=1e-5, atol=1e-25, equal_nan=True
    )


def test_rows_that_lie_apart_and_more_axes() -> None:
    weight, wide = torch.randn(40, 64), torch.randn(3, 7, 100)
    for x in (wide[..., :64], wide[..., :64].transpose(0, 1), torch.randn(64, 5).T, torch.zeros(0, 64)):
        found = linear(x, pack(weight), 40)
        assert found.shape == (*x.shape[:-1], 40)
        close(found, right(x, weight, None))


def test_long_sums_are_as_exact_as_short_ones() -> None:
    """One after the other they would be off by 7e-7."""
    x, weight = torch.rand(30, 3072), torch.rand(64, 3072)
    found, wanted = linear(x, pack(weight), 64).double(), right(x, weight, None)
    assert float((found - wanted).norm() / wanted.norm()) < 2.5e-7


def test_one_thread_and_three_give_the_same_bits() -> None:
    x, held = torch.randn(50, 1000), pack(torch.randn(100, 1000))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(x, held, 100)
        torch.set_num_threads(3)
        assert torch.equal(one, linear(x, held, 100))
    finally:
        torch.set_num_threads(before)


def test_what_holds_it() -> None:
    weight, bias = pack(torch.randn(37, 48)), torch.randn(37)
    run = Tape([TapeStep(ours.HeldFloats(weight, 37, bias, "gelu"), (0,))], 1, [1])
    for x in (torch.randn(2, 70, 48), torch.randn(5, 48), torch.randn(70, 2, 48).transpose(0, 1)):
        assert torch.equal(run(x)[0], linear(x, weight, 37, bias, "gelu"))
    assert run(torch.randn(0, 48))[0].shape == (0, 37)
    with pytest.raises(UsageError, match="in float32"):
        run(torch.randn(2, 70, 48).double())


def test_what_does_not_fit_is_told() -> None:
    x, weight, bias = torch.randn(4, 70), pack(torch.randn(33, 70)), torch.randn(33)
    for wrong in (
        (x[:, :60], weight, 33, bias),
        (x, weight, 70, bias),
        (x, weight, 33, bias[1:]),
        (x.double(), weight, 33, bias),
    ):
        with pytest.raises(UsageError, match=r"A linear in fp32 takes x .* given x"):
            linear(*wrong)
    with pytest.raises(UsageError, match="'tanh'; there are none, gelu"):
        linear(x, weight, 33, bias, "tanh")


def test_without_kernels_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight as it is, and of one that was packed where there are some."""
    x, weight, bias = torch.randn(4, 70), torch.randn(33, 70), torch.randn(33)
    panels = pack(weight)
    monkeypatch.setattr(ours, "kernels", lambda: "no C++ compiler")
    assert ours.told() == "torch (no C++ compiler)"
    assert torch.equal(pack(weight), weight)
    for held in (pack(weight), panels):
        close(linear(x, held, 33, bias, "relu"), right(x, weight, bias, "relu"))
    run = Tape([TapeStep(ours.HeldFloats(panels, 33, bias), (0,))], 1, [1])
    close(run(x)[0], right(x, weight, bias))
