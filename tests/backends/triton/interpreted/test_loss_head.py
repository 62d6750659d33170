"""The loss head's kernels in the mended interpreter: against float64, with ragged sizes, ignored labels, caps
and biases.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from effcompile.backends.triton import loss_head
from effcompile.ops.loss_head import MEAN, SUM, loss_head_backward, loss_head_forward, loss_head_gradients

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
N, D, V = 45, 40, 150  # ragged for tiles of 32


def make(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: int, cap: float | None
) -> Tensor:
    logits = torch.nn.functional.linear(x, weight, bias)
    logits = cap * torch.tanh(logits / cap) if cap else 0.5 * logits
    return cross_entropy(logits, target, ignore_index=-100, reduction="mean" if reduction == MEAN else "sum")


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("reduction", "cap", "biased"), [(MEAN, None, True), (SUM, 3.0, False)])
def test_loss_and_gradients(dtype: torch.dtype, reduction: int, cap: float | None, biased: bool) -> None:
    x, weight = make(N, D, seed=1, dtype=dtype), make(V, D, seed=2, dtype=dtype)
    bias = make(V, seed=3, dtype=dtype) if biased else None
    target = torch.arange(N) * 7 % V
    target[::5] = -100
    form = (reduction, -100, 1 / cap if cap else 0.5, cap or 1.0, cap is not None, 3)
    loss, lse = loss_head.forward(x, weight, bias, target, *form)
    found = loss_head.backward(torch.tensor(0.7), x, weight, bias, target, lse, *form, [True, True, biased])
    once, *at_once = loss_head.gradients(x, weight, bias, target, *form, [True, True, biased])
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    expected = reference(leaves[0], leaves[1], leaves[2] if biased else None, target, reduction, cap)
    (0.7 * expected).backward()
    for value in (loss, once):
        torch.testing.assert_close(value.double(), expected.detach(), rtol=LIMITS[dtype], atol=0.0)
    for got, same, leaf in zip(found, at_once, leaves, strict=False):
        assert leaf.grad is not None
        for gradient in (got, 0.7 * same):
            assert (gradient.double() - leaf.grad).norm() <= LIMITS[dtype] * leaf.grad.norm()


def test_all_labels_ignored() -> None:
    x, weight, target = (
        make(N, D, seed=1, dtype=torch.float32),
        make(V, D, seed=2, dtype=torch.float32),
        torch.full((N,), -100),
    )
    form = (MEAN, -100, 1.0, 1.0, False, 2)
    loss, lse = loss_head.forward(x, weight, None, target, *form)
    dx, dw, db = loss_head.backward(
        torch.tensor(1.0), x, weight, None, target, lse, *form, [True, True, False]
    )
    assert loss.isnan() and not dx.any() and not dw.any() and not db.numel()
    loss, dx, dw, _ = loss_head.gradients(x, weight, None, target, *form, [True, True, False])
    assert loss.isnan() and not dx.any() and not dw.any()


def test_a_label_that_is_no_class_is_seen() -> None:
    """There is no exception on a GPU: the loss is NaN."""
    x, weight, target = (
        make(N, D, seed=1, dtype=torch.float32),
        make(V, D, seed=2, dtype=torch.float32),
        torch.arange(N),
    )
    for wrong in (V, -1):
        target[3] = wrong
        form = (SUM, -100, 1.0, 1.0, False, 2)
        assert loss_head.forward(x, weight, None, target, *form)[0].isnan()
        assert loss_head.gradients(x, weight, None, target, *form, [True, False, False])[0].isnan()


def test_registered_it_is_the_operators_kernel() -> None:
    """And what it does not take (fp64) goes to the default one."""
    loss_head.register("cpu")
    for dtype in (torch.float32, torch.float64):
        x, weight, target = make(N, D, seed=1, dtype=dtype), make(V, D, seed=2, dtype=dtype), torch.arange(N)
        form = (SUM, -100, 1.0, 1.0, False, 2)
        torch.library.opcheck(
            loss_head_forward, (x, weight, None, target, *form), test_utils=("test_schema", "test_faketensor")
        )
        loss, lse = loss_head_forward(x, weight, None, target, *form)
        backward = (torch.ones((), dtype=dtype), x, weight, None, target, lse, *form, [True, False, False])
        torch.library.opcheck(loss_head_backward, backward, test_utils=("test_schema", "test_faketensor"))
        torch.testing.assert_close(loss, cross_entropy(x @ weight.T, target, reduction="sum"))
        every = (x, weight, None, target, *form, [True] * 3)
        torch.library.opcheck(loss_head_gradients, every, test_utils=("test_schema", "test_faketensor"))
