"""What kernels could get wrong in silence: odd strides and alignment, axes of size 0, far offsets, several
devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from effcompile.backends.triton import (
    attention,
    attention_calls,
    block_sparse,
    group_quant,
    loss_head,
    register,
    rows,
    states8,
)
from effcompile.backends.triton.layout import WIDEST, by_rows, matrix
from effcompile.core.errors import UsageError
from effcompile.ops import rows as row_ops
from effcompile.ops.attention import attention as attention_op
from effcompile.ops.attention_terms import Terms
from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.ops.group_quant import linear_by_torch, quantize_by_torch, quantize_groups, quantized_linear
from effcompile.ops.loss_head import SUM, loss_head_gradients
from effcompile.sparse.pattern import BlockPattern


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    assert register("cpu") is None


def odd(*shape: int, seed: int = 0) -> Tensor:
    """Not contiguous, and its memory begins where no vector load may."""
    whole = torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=torch.Generator().manual_seed(seed))
    return whole[..., 1 : 2 * shape[-1] : 2]


def head(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    form = (SUM, -100, 1.0, 1.0, False, 2)
    loss, lse = loss_head.forward(x, weight, None, target, *form)
    back = loss_head.backward(torch.tensor(1.0), x, weight, None, target, lse, *form, [True, True, False])
    return loss, *back[:2], *loss_head_gradients(x, weight, None, target, *form, [True, True, False])[:3]


def test_a_loss_head_of_odd_strides() -> None:
    x, weight, target = odd(9, 24), odd(40, 24, seed=1), torch.arange(18)[::2]
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    expected = cross_entropy(leaves[0] @ leaves[1].T, target, reduction="sum")
    wanted = (expected.detach(), *torch.autograd.grad(expected, leaves))
    for got, want in zip(head(x, weight, target), (*wanted, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for got, want in zip(head(x.t().contiguous().t(), weight, target), (*wanted, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_attention_of_odd_strides() -> None:
    q, k, v = odd(1, 2, 20, 16), odd(1, 20, 1, 16, seed=1).transpose(1, 2), odd(1, 1, 20, 16, seed=2)
    terms = Terms(scale=0.25, hi=0)
    out, lse = attention_calls.forward(q, k, v, terms)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=0.25
    )
    torch.testing.assert_close(out, wanted)
    grad = odd(1, 2, 20, 16, seed=3)
    found = attention_calls.backward(attention_calls.AttentionCall.of(q, k, v, terms, ()), grad, out, lse)
    for got, want in zip(found[:3], _gradients(q, k, v, grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=True, enable_gqa=True, scale=0.25
    )
    return torch.autograd.grad(out, leaves, grad)


ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "norm": (rows.norm, row_ops.rms_norm_by_torch, (odd(3, 24), odd(3, 24, seed=1), odd(24, seed=2), 1e-5)),
    "swiglu": (rows.swiglu, row_ops.swiglu_by_torch, (odd(3, 24), odd(3, 24, seed=1))),
    "rotary": (
        rows.rotary,
        row_ops.rotary_by_torch,
        (odd(1, 2, 5, 8), odd(1, 5, 8, seed=1), odd(1, 5, 8, seed=2), False),
    ),
    "codes": (group_quant.quantize, quantize_by_torch, (odd(3, 64), 32, torch.int8)),
    "linear": (
        group_quant.linear,
        linear_by_torch,
        (
            odd(5, 64),
            torch.ones(8, 64, dtype=torch.int8),
            odd(8, 2, seed=1),
            None,
            None,
            None,
            "none",
            torch.float32,
        ),
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_odd_strides(case: str) -> None:
    kernel, by_torch, arguments = ROWS[case]
    torch.testing.assert_close(kernel(*arguments), by_torch(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 8, 16), (1, 2, 0, 16), (1, 2, 8, 0)])
def test_attention_of_nothing(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    out, lse = attention_op(q, q, q, scale=1.0, hi=0)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_attention_to_no_keys() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 1, 0, 16)
    out, lse = attention_op(q, k, k, scale=1.0)
    assert not out.any()
    assert lse.isneginf().all()
    dq, dk, dv, *_ = torch.ops.effcompile.attention_backward(
        torch.randn(1, 2, 8, 16), q, k, k, out, lse, scale=1.0
    )
    assert not dq.any()
    assert dk.shape == dv.shape == k.shape


def test_rows_of_nothing() -> None:
    x, weight = torch.randn(0, 8), torch.randn(8)
    assert row_ops.rms_norm(x, None, weight, 1e-5)[0].shape == row_ops.swiglu(x, x).shape == (0, 8)
    codes, scales = torch.ones(4, 32, dtype=torch.int8), torch.ones(4, 1)
    assert quantized_linear(
        torch.randn(0, 32), codes, scales, None, None, None, "none", torch.float32
    ).shape == (0, 4)
    with pytest.raises(UsageError, match="scales"):
        quantized_linear(
            torch.randn(3, 0), codes[:, :0], scales[:, :0], None, None, None, "none", torch.float32
        )
    with pytest.raises(UsageError, match="last axis"):
        quantize_groups(torch.randn(3, 0), 8, torch.int8)


def test_a_weight_without_blocks() -> None:
    pattern = BlockPattern.from_blocks(torch.zeros(2, 3, dtype=torch.bool), 16)
    x = torch.randn(5, 48, requires_grad=True)
    values = torch.zeros(0, 16, 16, requires_grad=True)
    y = block_sparse_linear(x, values, *pattern.indices, None)
    assert y.shape == (5, 32)
    assert not y.any()
    dx, dvalues = torch.autograd.grad(y.sum(), (x, values))
    assert not dx.any()
    assert dvalues.shape == values.shape


def far(*shape: int, stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Sizes and strides alone: nothing is allocated."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def test_offsets_beyond_32_bits() -> None:
    """Within a tile 32 bits must do: rows that lie too far apart are copied together, and terms that do are
    not taken.
    """
    near, apart = (
        far(1, 1, 8, 16, stride=(128, 128, WIDEST, 1)),
        far(1, 1, 8, 16, stride=(128, 128, WIDEST + 1, 1)),
    )
    assert by_rows(near) is near
    assert by_rows(apart).stride() == (128, 128, 16, 1)
    assert matrix(far(2, 4, 8, stride=(2**33, 2**31, 1))).stride() == (8, 1)
    assert (WIDEST + 1) * 256 > 2**31 - 1 >= WIDEST * 255
    q, bias = torch.randn(1, 1, 8, 16), far(1, 1, 8, 8, stride=(0, 0, WIDEST + 1, 1))
    assert "bias" in (attention.declines(q, q, q, Terms(scale=1.0, bias=bias)) or "")
    mask = far(1, 1, 8, 8, stride=(0, 0, 8, WIDEST + 1), dtype=torch.bool)
    assert "mask" in (attention.declines(q, q, q, Terms(scale=1.0, mask=mask)) or "")


def test_several_devices() -> None:
    """The error names the tensor and both devices, before a pointer is read."""
    here, there = torch.randn(4, 32), torch.empty(4, 32, device="meta")
    q = torch.randn(1, 1, 8, 16)
    pattern = BlockPattern.from_blocks(torch.ones(2, 2, dtype=torch.bool), 16)
    labels = torch.zeros(4, dtype=torch.int64)
    codes = torch.ones(4, 32, dtype=torch.int8)
    state = torch.zeros(256, dtype=torch.uint8)
    table = torch.zeros(256)
    calls: dict[str, Callable[[], Any]] = {
        "k": lambda: attention._attention(q, q.to("meta"), q, scale=1.0),
        "W": lambda: loss_head.forward(here, there, None, labels, SUM, -100, 1.0, 1.0, False, 1),
        "scales": lambda: group_quant.linear(
            here, codes, torch.empty(4, 1, device="meta"), None, None, None, "none", torch.float32
        ),
        "weight": lambda: rows.norm(here, None, torch.empty(32, device="meta"), 1e-5),
        "up": lambda: rows.swiglu(here, there),
        "values": lambda: block_sparse_linear._init_fn(
            here, torch.empty(4, 16, 16, device="meta"), *pattern.indices
        ),
        "grad": lambda: states8.lion(
            torch.zeros(256),
            torch.zeros(256, device="meta"),
            state,
            torch.ones(1),
            table,
            1e-3,
            0.9,
            0.99,
            0.0,
        ),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=rf"one device; {name} is on meta, \S+ on cpu"):
            call()


def test_blocks_that_the_kernels_have_not() -> None:
    assert "blocks of 16, 32, 64, 128" in str(block_sparse.kernels(torch.randn(2, 48), 24))
