"""Torch's fused kernels are planned only where they update as the optimizer's own code does."""

import pytest
import torch
from torch import nn

from effcompile.ops.optimizers import _FUSED, given_form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "kind", sorted(_FUSED, key=lambda each: each.__name__), ids=lambda each: each.__name__
)
def test_a_fused_update_that_is_planned_is_the_plain_one(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    before, gradient = (torch.rand(64, 65) - 0.5).to(dtype), torch.randn(64, 65).to(dtype)
    parameter = nn.Parameter(before.clone())
    fused = given_form(kind([parameter], lr=0.1), "cpu").fused  # type: ignore[call-arg]
    after = []
    for form in (fused, False):
        parameter = nn.Parameter(before.clone())
        parameter.grad = gradient.clone()
        optimizer = kind([parameter], lr=0.1, fused=form)  # type: ignore[call-arg]
        for _ in range(2):
            optimizer.step()
        after.append(parameter.detach().double())
    moved = float((after[1] - before.double()).norm())
    assert (
        moved > 0
        and float((after[0] - after[1]).norm()) <= (2e-2 if dtype is torch.bfloat16 else 1e-5) * moved
    )


def test_sgd_in_16_bits_is_not_fused_on_a_cpu_but_beside_it_is() -> None:
    narrow, wide = (nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert not given_form(torch.optim.SGD([narrow, wide]), "cpu").fused
    assert (
        given_form(torch.optim.SGD([wide]), "cpu").fused
        and given_form(torch.optim.AdamW([narrow]), "cpu").fused
    )
