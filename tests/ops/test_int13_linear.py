"""Linears in codes of 13 bits against what they are defined as, in fp64, and against fp32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.estimate import fake_quant
from effcompile.ir.formats import INT13_TOKEN
from effcompile.ops import int13_codes, int13_linear
from effcompile.ops.int8_codes import AFTER
from effcompile.ops.int8_held import HeldWords
from effcompile.ops.tape import Tape, TapeStep

linear = torch.ops.effcompile.int13_linear
MOST = int13_codes.MOST


def made(n: int, k: int, *, biased: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    codes, scales = int13_codes.quantize(torch.randn(n, k))
    return int13_codes.pack(codes), scales, torch.randn(n) if biased else None


def close(found: Tensor, wanted: Tensor) -> None:
    largest = float(wanted.nan_to_num().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6 * largest, equal_nan=True)


SIZES = st.integers(1, 300)


@settings(deadline=None, max_examples=40)
@given(SIZES, SIZES, SIZES, st.sampled_from(AFTER), st.integers(1, 2))
def test_any_shape(m: int, k: int, n: int, after: str, threads: int) -> None:
    torch.manual_seed(m * k + n)
    x, held, before = torch.randn(m, k), made(n, k, biased=bool(n % 2)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        close(linear(x, *held, after), int13_codes.linear_by_torch(x, *held, after))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", int13_linear.isas())
def test_each_instruction_set_gives_the_product(isa: str) -> None:
    """The lesser ones, too, that another processor would use."""
    torch.manual_seed(0)
    kernels = int13_linear.WordKernels(isa)
    assert kernels.objection() is None
    for m, k, n in ((1, 7, 3), (33, 391, 53), (130, 1025, 160)):
        x, held = torch.randn(m, k), made(n, k)
        close(kernels.linear(x, *held, "none"), int13_codes.linear_by_torch(x, *held, "none"))


def test_sums_of_the_largest_codes_do_not_overflow() -> None:
    k = 3000
    weight = int13_codes.pack(torch.full((20, k), -MOST, dtype=torch.int16))
    for sign in (1.0, -1.0):
        found = linear(torch.full((9, k), sign), weight, torch.ones(20))
        torch.testing.assert_close(found, torch.full((9, 20), -sign * k * MOST), rtol=1e-5, atol=0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_with_what_is_no_number_is_nan_alone(odd: float) -> None:
    x, held = torch.randn(20, 70), made(33, 70)
    x[3, 69] = odd
    found = linear(x, *held)
    assert found[3].isnan().all() and found[torch.arange(20) != 3].isfinite().all()


def test_rows_of_zeros_and_of_tiny_numbers_give_the_bias() -> None:
    weight, scales, bias = made(33, 70)
    assert bias is not None
    for x in (torch.zeros(4, 70), torch.full((4, 70), 1e-38), torch.zeros(0, 70)):
        assert torch.equal(linear(x, weight, scales, bias), bias.expand(len(x), 33))


def test_rows_that_lie_apart_and_more_axes() -> None:
    held, wide = made(40, 64), torch.randn(3, 7, 100)
    for x in (wide[..., :64], wide[..., :64].transpose(0, 1), torch.randn(64, 5).T):
        close(linear(x, *held), int13_codes.linear_by_torch(x, *held, "none"))


def test_it_is_what_plans_take_it_for() -> None:
    """The emulation that errors are measured with."""
    x, weight = torch.randn(50, 200), torch.randn(30, 200)
    codes, scales = int13_codes.quantize(weight)
    emulated = fake_quant.activation(x, INT13_TOKEN, None) @ fake_quant.weight(weight, INT13_TOKEN).T
    found = linear(x, int13_codes.pack(codes), scales)
    assert float((found - emulated).norm() / emulated.norm()) < 1e-4, "but for codes at a half"
    exact = x.double() @ weight.double().T
    assert float((found - exact).norm() / exact.norm()) < 6e-4


def test_codes_come_back() -> None:
    codes = torch.randint(-MOST, MOST + 1, (37, 51), dtype=torch.int16)
    assert torch.equal(int13_codes.unpack(int13_codes.pack(codes), 37, 51), codes)


def test_what_holds_it() -> None:
    for k, after, biased in ((48, "none", True), (47, "gelu", False)):
        held = made(37, k, biased=biased)
        run = Tape([TapeStep(HeldWords(*held, after), (0,))], 1, [1])
        turned = torch.randn(70, 2, k).transpose(0, 1)
        for x in (torch.randn(2, 70, k), torch.randn(5, k), turned, torch.randn(0, k)):
            assert torch.equal(run(x)[0], linear(x, *held, after))
        with pytest.raises(UsageError, match="in float32"):
            run(torch.randn(2, 70, k).double())


def test_what_does_not_fit_is_told() -> None:
    x, (weight, scales, bias) = torch.randn(4, 70), made(33, 70)
    for wrong in (
        (x[:, :60], weight, scales, bias),
        (x, weight.int(), scales, bias),
        (x, weight, scales[1:], bias),
    ):
        with pytest.raises(UsageError, match=r"A linear in 13 bits takes x .* given x"):
            linear(*wrong)
    with pytest.raises(UsageError, match="'tanh'; there are none, gelu"):
        linear(x, weight, scales, bias, "tanh")


def test_without_kernels_torch_computes_it_and_no_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int13_linear, "kernels", lambda: "this processor has no VNNI")
    x, held = torch.randn(4, 70), made(33, 70)
    with pytest.warns(RuntimeWarning, match="by torch, slowly: this processor has no VNNI"):
        close(linear(x, *held), int13_codes.linear_by_torch(x, *held, "none"))
    assert "no VNNI" in str(int13_linear.refusal(100))
    assert "reading weights" in str(int13_linear.refusal(8))
