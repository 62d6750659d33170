"""A default dtype of the user's own changes no number of a kernel, and no plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.floats import in_fp32
from effcompile.ops import fp32_attention, recurrence
from effcompile.ops.instruction_sets import best_of


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def others_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))


def test_an_attention_is_in_fp32(others_default: torch.dtype) -> None:
    q = _drawn(2, 4, 9, 16)
    made = torch.ops.effcompile.fp32_attention(q, q, q, None, True, None)
    right = fp32_attention.by_torch(q, q, q, None, True, None)
    torch.testing.assert_close(made, right)


def test_a_convolution_of_few_tokens_is_in_fp32(others_default: torch.dtype) -> None:
    given = _drawn(2, 5, 8), _drawn(8, 4), None, _drawn(2, 8, 4)
    right = recurrence.short_conv_by_torch(*given, True)
    for one, other in zip(torch.ops.effcompile.short_conv(*given, True), right, strict=True):
        torch.testing.assert_close(one, other)


class Kernel:
    """Right where it is compared in fp32."""

    instead = ""

    def objection(self) -> str | None:
        return None if torch.ones(1).dtype is torch.float32 else "wrong"


def test_kernels_are_compared_in_fp32(others_default: torch.dtype) -> None:
    assert isinstance(best_of(lambda isa, instead: Kernel(), ["generic"]), Kernel)
    with in_fp32():
        assert torch.ones(1).dtype is torch.float32
    assert torch.ones(1).dtype is others_default


def test_a_model_in_fp32_is_planned(others_default: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).float().eval()
    x = _drawn(4, 16)
    made = effcompile.optimize(model, inputs=x, max_error=0.05, backend="torch-eager")
    found, right = made(x), model(x)
    assert found.dtype is torch.float32 and (found - right).norm() <= 0.05 * right.norm()
