"""A tensor times a number, where it lies."""

import pytest
import torch

from effcompile.ops.scaled import scale_


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0, 0.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_and_the_same_memory(factor: float, dtype: torch.dtype) -> None:
    x = torch.randn(7, 5).to(dtype)
    right, number = x * factor, torch.tensor(factor)
    made = scale_(x, number)
    assert made.data_ptr() == x.data_ptr() and torch.equal(made.isnan(), right.isnan())
    assert torch.equal(made.nan_to_num(0), right.nan_to_num(0))


def test_by_one_nothing_is_read() -> None:
    x = torch.randn(3)
    with torch.profiler.profile() as profile:
        scale_(x, torch.tensor(1.0))
    assert "aten::mul_" not in {event.key for event in profile.key_averages()}
