"""The operator on the tiled kernels: registered for the CPU here, as it would be for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from effcompile.backends import triton
from effcompile.backends.triton import attention as tiled
from effcompile.backends.triton import attention_calls
from effcompile.ops import attention_kernel
from effcompile.ops.attention import attention
from effcompile.ops.attention_terms import Terms
from effcompile.ops.visibility import Visibility

OP = torch.ops.effcompile.attention.default


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    assert triton.register("cpu") is None


def inputs(requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, 36, 16, generator=generator) for heads in (2, 1, 1)]
    q, k, v = (t.requires_grad_(requires_grad) for t in made)
    return q, k, v


def test_opcheck() -> None:
    q, k, v = inputs()
    bias, sink = torch.zeros(1, 2, 36, 36, requires_grad=True), torch.zeros(2, requires_grad=True)
    torch.library.opcheck(OP, (q, k, v, bias, sink), {"scale": 0.25, "hi": 0})


def test_opcheck_with_lists() -> None:
    lists = Visibility(lo=-9, hi=0).tiles(16, 32, q_len=36, k_len=36).tensors()
    args = (*inputs(), None, None, None, None, None, None, lists)
    torch.library.opcheck(OP, args, {"scale": 0.25, "lo": -9, "hi": 0, "block_q": 16, "block_k": 32})


def test_the_tiled_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the default ones, whose results would be the same."""
    q, k, v = inputs()
    for name in ("forward", "backward"):
        monkeypatch.setattr(attention_kernel, name, None)
    attention(q, k, v, scale=0.25, hi=0)[0].sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "no tensor-core kernel"),
        ({"length": 0}, "empty"),
        ({"block_q": 24}, "no multiple of 16"),
    ],
)
def test_what_is_declined_falls_back(change: dict[str, Any], reason: str) -> None:
    q, k, v = (
        t.detach()[:, :, : change.get("length")].to(change.get("dtype", torch.float32)) for t in inputs()
    )
    form: dict[str, Any] = {"scale": 0.25, "hi": 0}
    rest: list[Any] = []
    if "block_q" in change:
        rest = [None] * 6 + [Visibility(hi=0).tiles(24, 32, q_len=36, k_len=36).tensors()]
        form |= {"block_q": 24, "block_k": 32}
    said = tiled.declines(q, k, v, Terms.of(*rest, **form))
    assert said is not None and reason in said
    out, _ = attention(q, k, v, *rest, **form)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)


def test_no_keys_at_all() -> None:
    q, k, v = (t.detach() for t in inputs())
    out, lse = attention_calls.forward(q, k[:, :, :0], v[:, :, :0], Terms(scale=0.25))
    assert torch.equal(out, torch.zeros_like(q)) and bool(lse.isneginf().all())


def test_equal_gradients_whatever_the_bias_sums_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms sum a shared bias's gradient without atomics."""
    results = []
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda on=deterministic: on)
        q, k, v = inputs(requires_grad=False)
        bias = torch.ones(1, 1, 36, 1).mul_(0.5).requires_grad_()
        out = attention(q, k, v, bias, torch.ones(2), scale=0.25, hi=0)[0]
        out.square().sum().backward()
        results.append(bias.grad)
    torch.testing.assert_close(*results)
