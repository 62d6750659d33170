"""Linears of few rows against their definition in float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.machine import instructions
from effcompile.ops import few_rows

SETS = instructions.integer_isas()
pytestmark = pytest.mark.skipif(isinstance(few_rows.kernels(), str), reason="no kernels are compiled here")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(SETS),
    rows=st.integers(1, 9),
    n=st.integers(1, 90),
    k=st.integers(1, 150),
    biased=st.booleans(),
    threads=st.integers(1, 2),
)
def test_of_any_shape(isa: str, rows: int, n: int, k: int, biased: bool, threads: int) -> None:
    x, weight = drawn(rows, k), drawn(n, k, seed=1)
    bias = drawn(n, seed=2) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = few_rows.FewRows(isa).linear(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def test_many_outputs_by_two_threads() -> None:
    x, weight = drawn(1, 1, 300), drawn(3000, 300, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(
            few_rows.linear(x, weight), F.linear(x.double(), weight.double()).float(), rtol=1e-5, atol=1e-4
        )
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = drawn(2, 40)
    x[1, 3] = torch.inf
    found = few_rows.linear(x, drawn(5, 40).abs())
    assert found[0].isfinite().all() and found[1].isposinf().all()


@pytest.mark.parametrize(
    "x",
    [
        drawn(few_rows.ROWS + 1, 24),
        drawn(0, 24),
        drawn(24, 2).T,
        drawn(3, 24).double(),
    ],
    ids=["more rows", "none", "not dense", "float64"],
)
def test_what_torch_computes(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object) -> Tensor:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(few_rows.FewRows, "linear", refuses)
    weight = drawn(7, 24, seed=1).to(x.dtype)
    assert torch.equal(few_rows.linear(x, weight), F.linear(x, weight))


def test_a_wrong_depth_is_what_torch_says() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        few_rows.linear(drawn(1, 23), drawn(7, 24))


def test_a_models_own_linears_within(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wide = torch.nn.Linear(24, 7), torch.nn.Linear(24, 7, bias=False).double()
    asked: list[tuple[int, ...]] = []
    ours = few_rows.linear
    monkeypatch.setattr(few_rows, "linear", lambda x, *held: asked.append(x.shape) or ours(x, *held))
    x = drawn(2, 1, 24)
    with torch.no_grad():
        right = model(x)
        with few_rows.ByFewRows():
            torch.testing.assert_close(model(x), right)
            wide(x.double())
    assert asked == [(2, 1, 24)]  # of float64 the weight is none of theirs
    with few_rows.ByFewRows():
        assert model(x).requires_grad  # gradients are torch's
