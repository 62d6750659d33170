"""The compiled softmax of a loss head: torch's in float64, for every shape; labels that are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.ops import loss_head, loss_rows
from effcompile.ops.loss_head import MEAN

DTYPES = (torch.float32, torch.bfloat16)
ours = torch.ops.effcompile


KERNELS = loss_rows.kernels()
pytestmark = pytest.mark.skipif(isinstance(KERNELS, str), reason=str(KERNELS))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 300), scale=st.sampled_from([1.0, 0.5, 3.0]),
    wide=st.sampled_from([0.01, 1.0, 60.0, 1e4]), odd=st.sampled_from([None, float("-inf"), float("nan")]),
    dtype=st.sampled_from(DTYPES), threads=st.sampled_from([1, 2, 5]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_equals_the_softmax_in_double(
    rows: int, columns: int, scale: float, wide: float, odd: float | None, dtype: torch.dtype, threads: int,
    seed: int,
) -> None:  # fmt: skip
    assert not isinstance(KERNELS, str)
    before = torch.get_num_threads()
    torch.manual_seed(seed)
    z = (torch.randn(rows, columns) * wide).to(dtype)
    if odd is not None:
        z[seed % rows, seed % columns] = odd
    index, factors = torch.randint(0, columns, (rows, 1)), torch.randn(rows, 1)
    log = torch.log_softmax(z.double() * scale, 1)
    right = (log.exp() - torch.zeros_like(log).scatter_(1, index, 1.0)) * factors
    picked, lse, again = torch.empty(rows, 1), torch.empty(rows, 1), z.clone()
    torch.set_num_threads(threads)
    try:
        KERNELS.run(z.clone(), index, scale, picked=picked, lse=lse)
        KERNELS.run(again, index, scale, factors=factors, lse=lse, given=True)
        KERNELS.run(z, index, scale, factors=factors)
    finally:
        torch.set_num_threads(before)
    loose = 1e-5 + 4e-7 * scale * wide
    _close(picked, log.gather(1, index), loose * 10)
    for gradient in (z, again):
        _close(gradient, right, loose if dtype is torch.float32 else 2**-8)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 300), apart=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES), threads=st.sampled_from([1, 2]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_rows_that_lie_apart_are_each_their_own_and_what_is_between_stays(
    rows: int, columns: int, apart: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    assert not isinstance(KERNELS, str)
    before = torch.get_num_threads()
    torch.manual_seed(seed)
    memory = torch.full((rows, columns + apart), 7.0).to(dtype)
    z = memory[:, :columns]
    z.copy_(torch.randn(rows, columns) * 5)
    index, factors = torch.randint(0, columns, (rows, 1)), torch.randn(rows, 1)
    log = torch.log_softmax(z.double(), 1)
    right = (log.exp() - torch.zeros_like(log).scatter_(1, index, 1.0)) * factors
    picked = torch.empty(rows, 1)
    torch.set_num_threads(threads)
    try:
        KERNELS.run(z, index, 1.0, factors=factors, picked=picked)
    finally:
        torch.set_num_threads(before)
    _close(picked, log.gather(1, index), 1e-5)
    _close(z, right, 1e-5 if dtype is torch.float32 else 2**-8)
    assert memory[:, columns:].eq(7.0).all()


@pytest.mark.parametrize(("columns", "stride"), [(50257, 50272), (64, 64), (1, 32), (33, 64)])
def test_rows_of_two_bytes_begin_at_a_line_of_the_cache(columns: int, stride: int) -> None:
    assert loss_rows.row_stride(columns, torch.bfloat16) == stride
    assert loss_rows.row_stride(columns, torch.float32) == columns


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("columns", [64, 97, 131])
def test_a_head_in_bf16_is_as_near_to_double_as_its_rounding(
    columns: int, chunks: int, new_memory_is_nan: None
) -> None:
    torch.manual_seed(columns)
    narrow = [torch.randn(shape).mul_(0.3).to(torch.bfloat16) for shape in ((50, 16), (columns, 16))]
    target = torch.randint(0, columns, (50,)).masked_fill_(torch.arange(50) % 7 == 0, -100)
    form = (None, target, MEAN, -100, 1.0, 1.0, False, chunks)
    x, weight = (t.double().requires_grad_() for t in narrow)
    right = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    right.backward()
    loss, *once = ours.loss_head_gradients(*narrow, *form, [True, True, False])
    again, lse = ours.loss_head_forward(*narrow, *form)
    given = (*narrow, *form[:2], lse, *form[2:])
    twice = ours.loss_head_backward(torch.tensor(1.0), *given, [True, True, False])
    for found in (loss, again):
        assert abs(float(found) - float(right)) <= 1e-2
    for found in (once, twice):
        for a, b in zip(found[:2], (x.grad, weight.grad), strict=True):
            assert b is not None
            assert float((a.double() - b).norm()) <= 1e-2 * float(b.norm())


def _close(found: Tensor, right: Tensor, tolerance: float) -> None:
    assert torch.allclose(found.double(), right, tolerance, tolerance, equal_nan=True)


def test_an_infinite_logit_gives_nan_as_torch_does() -> None:
    z = torch.zeros(2, 40)
    z[0, 3] = torch.inf
    assert not isinstance(KERNELS, str)
    KERNELS.run(z, torch.zeros(2, 1, dtype=torch.long), 1.0, factors=torch.ones(2, 1))
    assert z[0].isnan().all() and not z[1].isnan().any()


@pytest.mark.parametrize("label", [-1, 40, 2**40])
def test_a_label_that_is_none_is_refused_as_torch_refuses_it(label: int) -> None:
    x, weight, target = torch.randn(6, 8), torch.randn(40, 8), torch.tensor([0, 1, label, 3, 4, 5])
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        ours.loss_head_gradients(x, weight, None, target, MEAN, -100, 1.0, 1.0, False, 2, [True, True, False])


def test_labels_of_another_dtype_are_refused_as_torch_refuses_them() -> None:
    args = (torch.randn(6, 8), torch.randn(40, 8), None, torch.arange(6, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="int64"):
        ours.loss_head_gradients(*args, MEAN, -100, 1.0, 1.0, False, 2, [True, True, False])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_without_kernels_torch_says_the_same(
    dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight, target = torch.randn(50, 16).to(dtype), torch.randn(99, 16).to(dtype), torch.arange(50)
    target[10:20] = -100
    args = (x, weight, None, target, MEAN, -100, 1.0, 1.0, False, chunks, [True, True, False])
    found = ours.loss_head_gradients(*args)
    monkeypatch.setattr(loss_head, "where_for", lambda *args, **kwargs: None)
    right = ours.loss_head_gradients(*args)
    for a, b in zip(found[:3], right[:3], strict=True):
        assert float((a.float() - b.float()).norm()) <= (1e-5 if dtype is torch.float32 else 1e-2) * float(
            b.float().norm()
        )
