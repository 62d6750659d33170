"""Linears in bf16, alone and in MLPs, against fp64 of the numbers that they round to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.core.errors import UsageError
from effcompile.estimate import fake_quant
from effcompile.ir.formats import BF16
from effcompile.ops import bf16_linear, bf16_mlp
from effcompile.ops.int8_codes import AFTER, followed
from effcompile.ops.tape import Tape, TapeStep

linear = torch.ops.effcompile.bf16_linear
SIZES = st.integers(1, 300)
#: What is between two linears: in one part, and in several.
BETWEEN = SIZES | st.sampled_from([1024, 1025, 2047, 2049, 3000, 3072])


def made(n: int, k: int, *, biased: bool = True) -> tuple[Tensor, int, Tensor | None]:
    return bf16_linear.pack(torch.randn(n, k) / k**0.5), n, torch.randn(n) if biased else None


def exact(x: Tensor, held: tuple[Tensor, int, Tensor | None], after: str = "none") -> Tensor:
    """In fp64, of numbers that are rounded."""
    weight, n, bias = held
    plain = weight.transpose(1, 2).reshape(-1, 2 * weight.shape[1])[:n, : x.shape[-1]].double()
    return followed(F.linear(x.bfloat16().double(), plain, None if bias is None else bias.double()), after)


def close(found: Tensor, wanted: Tensor, within: float = 2e-6) -> None:
    largest = float(wanted.nan_to_num().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=within * largest, equal_nan=True)


@settings(deadline=None, max_examples=40)
@given(SIZES, SIZES, SIZES, st.sampled_from(AFTER), st.integers(1, 2))
def test_linears_of_any_shape(m: int, k: int, n: int, after: str, threads: int) -> None:
    torch.manual_seed(m * k + n)
    x, held, before = torch.randn(m, k), made(n, k, biased=bool(n % 2)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        close(linear(x, *held, after), exact(x, held, after))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("k", [1, 31, 383, 385, 1000, 3000])
def test_parts_of_a_deep_product(k: int) -> None:
    x, held = torch.randn(300, k), made(70, k)
    close(linear(x, *held), exact(x, held))


@pytest.mark.parametrize("k", [1024, 1025, 2051, 3072])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_residual_is_added_to_parts_of_a_deep_product(k: int, threads: int) -> None:
    x, held, residual, before = (
        torch.randn(301, k),
        made(70, k),
        torch.randn(301, 70),
        torch.get_num_threads(),
    )
    torch.set_num_threads(threads)
    try:
        found = bf16_mlp.run(x, None, "none", held, (residual, None, None, None))
    finally:
        torch.set_num_threads(before)
    close(found, exact(x, held) + residual)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 600), SIZES, BETWEEN, SIZES, st.sampled_from(AFTER), st.integers(1, 2), st.integers(0, 3)
)
def test_mlps_of_any_shape(
    m: int, k: int, between: int, n: int, after: str, threads: int, behind: int
) -> None:
    torch.manual_seed(m + k * between + n)
    x, first, last = torch.randn(m, k), made(between, k, biased=bool(k % 2)), made(n, between)
    residual, norm = torch.randn(m, n), (torch.randn(n), None, 1e-5)
    told = ((None, None, None, None), (residual, None, None, None), (None, *norm), (residual, *norm))[behind]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = bf16_mlp.run(x, first, after, last, told)
    finally:
        torch.set_num_threads(before)
    wanted = exact(exact(x, first, after).float(), last)
    wanted = wanted + residual if told[0] is not None else wanted
    if told[3] is not None:
        assert told[1] is not None
        wanted = F.layer_norm(wanted, (n,), told[1].double(), None, 1e-5)
    room = 3e-2 if n < 8 else 5e-3  # a norm of few columns divides by what may be nearly 0
    assert float((found - wanted).norm()) <= room * float(wanted.norm()) + 1e-6


def test_between_two_linears_gelu_is_as_good_as_bf16() -> None:
    """Of one row to one column, what is between comes out."""
    x = torch.linspace(-8, 8, 4001)[:, None].bfloat16().float()
    one = torch.ones(1, 1)
    held = bf16_linear.pack(one), 1, None
    found = bf16_mlp.run(x, held, "gelu", held, (None,) * 4)
    right = F.gelu(x.double())
    assert float((found - right).abs().max()) < 2.0**-9 * 8 + 1e-4
    near = x.abs() < 2
    assert float((found - right)[near].norm() / right[near].norm()) < 2e-3


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_row_alone(odd: float) -> None:
    x, held = torch.randn(40, 70), made(33, 70)
    x[3, 69] = odd
    found = linear(x, *held)
    assert not found[3].isfinite().any() and found[torch.arange(40) != 3].isfinite().all()


def test_rows_that_lie_apart_more_axes_and_none() -> None:
    held, wide = made(40, 64), torch.randn(3, 7, 100)
    for x in (wide[..., :64], wide[..., :64].transpose(0, 1), torch.randn(64, 5).T, torch.randn(0, 64)):
        close(linear(x, *held), exact(x, held))
    narrow = linear(wide[..., :64], *held, "gelu", narrow=True)
    assert narrow.dtype is torch.bfloat16
    assert torch.equal(narrow, linear(wide[..., :64], *held, "gelu").bfloat16())


def test_it_is_what_plans_take_linears_in_bf16_for() -> None:
    """The emulation that errors are measured with."""
    x, weight = torch.randn(50, 200), torch.randn(30, 200)
    emulated = fake_quant.activation(x, BF16, None) @ fake_quant.weight(weight, BF16).T
    found = linear(x, bf16_linear.pack(weight), 30)
    assert float((found - emulated).norm() / emulated.norm()) < 1e-6


def test_what_holds_linears_in_bf16() -> None:
    for k, after, biased in ((48, "none", True), (47, "gelu", False)):
        held = made(37, k, biased=biased)
        run = Tape([TapeStep(bf16_linear.HeldHalves(*held, after), (0,))], 1, [1])
        turned = torch.randn(70, 2, k).transpose(0, 1)
        for x in (torch.randn(2, 70, k), torch.randn(5, k), turned, torch.randn(0, k)):
            assert torch.equal(run(x)[0], linear(x, *held, after))
        half = Tape([TapeStep(bf16_linear.HeldHalves(*held, after, narrow=True), (0,))], 1, [1])
        assert torch.equal(half(turned)[0], linear(turned, *held, after, narrow=True))
        with pytest.raises(UsageError, match="in float32"):
            run(torch.randn(2, 70, k).double())


def test_what_holds_an_mlp_in_bf16() -> None:
    first, last, norm = made(90, 64), made(64, 90), (torch.randn(64), torch.randn(64), 1e-5)
    held = bf16_mlp.HeldHalvesMlp(first, "gelu", last, norm)
    one = bf16_mlp.HeldHalvesMlp(None, "none", made(64, 64), norm)
    run = Tape([TapeStep(held, (0, 1)), TapeStep(one, (2, 0))], 2, [2, 3])
    for rows in (3, 32, 150):
        x, residual = torch.randn(2, rows, 64), torch.randn(2, rows, 64)
        wanted = held(x, residual)
        found = run(x, residual)
        assert torch.equal(found[0], wanted) and torch.equal(found[1], one(wanted, x))


def test_what_is_no_linear_in_bf16_is_told() -> None:
    x, (weight, n, bias) = torch.randn(4, 70), made(33, 70)
    assert bias is not None
    for wrong in ((x[:, :60], weight, n, bias), (x, weight.float(), n, bias), (x, weight, n, bias[1:])):
        with pytest.raises(UsageError, match=r"A linear in bf16 takes x .* given x"):
            linear(*wrong)
    with pytest.raises(UsageError, match="'tanh'; there are none, gelu"):
        linear(x, weight, n, bias, "tanh")


def test_without_tiles_torch_computes_linears_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_linear, "kernels", lambda: "there is no compiler")
    x, first, last = torch.randn(2, 40, 30), made(50, 30), made(20, 50)
    close(linear(x, *first, "silu"), exact(x, first, "silu"))
    found = bf16_mlp.run(x, first, "gelu", last, (torch.ones(2, 40, 20), None, None, None))
    close(found, exact(exact(x, first, "gelu").float(), last) + 1, 1e-3)
    assert bf16_linear.fallback_reason() == "there is no compiler" and not bf16_linear.multiplies(100)
