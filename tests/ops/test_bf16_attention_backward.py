"""Gradients of bf16 attentions by tiles: as near to float64's as torch's are for every shape, torch's where
they do not fit, and no byte more than is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.ops.bf16_attention_backward import Given, bf16_attention_backward, kernels
from effcompile.ops.torch_attention import BACKWARD, FORWARD, runs_in
from effcompile.ops.workspace import workspace_bytes

KERNELS = kernels()
pytestmark = [
    pytest.mark.skipif(isinstance(KERNELS, str), reason=str(KERNELS)),
    pytest.mark.skipif(not runs_in(torch.bfloat16), reason="torch's own kernel does not run in bf16"),
]


def problem(
    batch: int, heads: int, queries: int, keys: int, width: int, *, turned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the result; `turned`: in memory as (B, S, H, D)."""
    torch.manual_seed(queries + keys + width)
    made = []
    for rows in (queries, keys, keys, queries):
        shape = (batch, rows, heads, width) if turned else (batch, heads, rows, width)
        x = torch.randn(shape).bfloat16()
        made.append(x.transpose(1, 2) if turned else x)
    return made[0], made[1], made[2], made[3]


def both(
    given: tuple[Tensor, ...], mask: Tensor | None, causal: bool, scale: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ours, torch's and float64's."""
    q, k, v, upper = given
    out, lse = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    args = (upper, q, k, v, out, lse, 0.0, causal, mask, scale)
    assert Given(*args).fits()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = None if mask is None else mask.double()
    F.scaled_dot_product_attention(*leaves, wide, is_causal=causal, scale=scale).backward(upper.double())
    torchs = BACKWARD(*args[:8], attn_mask=mask, scale=scale)
    return list(zip(bf16_attention_backward(*args), torchs, [x.grad for x in leaves], strict=True))  # type: ignore[list-item]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 3), queries=st.integers(1, 300), keys=st.integers(1, 300),
    width=st.integers(1, 140), kind=st.sampled_from(["plain", "causal", "mask", "narrow mask", "one row"]),
    turned=st.booleans(), threads=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_as_near_to_float64_as_torch_for_every_shape(
    batch: int, heads: int, queries: int, keys: int, width: int, kind: str, turned: bool, threads: int
) -> None:
    mask = None
    torch.manual_seed(batch + queries + keys)
    if kind in ("mask", "narrow mask", "one row"):
        mask = torch.randn(batch, 1, 1 if kind == "one row" else queries, keys)
        mask = mask.masked_fill(torch.rand(mask.shape) < 0.4, -1e9).expand(batch, 1, queries, keys)
        mask = mask.bfloat16() if kind == "narrow mask" else mask
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = problem(batch, heads, queries, keys, width, turned=turned)
        found = both(given, mask, kind == "causal", width**-0.5)
    finally:
        torch.set_num_threads(before)
    largest = max(float(right.norm()) for _, _, right in found)
    for ours, torchs, right in found:
        error, allowed = (float((each.double() - right).norm()) for each in (ours, torchs))
        # p, ds and what is returned are rounded by 2^-9 each: of a few elements that may be all on one side
        assert error <= 1.25 * allowed + 2**-8 * largest


def test_a_nan_stays_one_and_a_masked_key_gets_no_gradient() -> None:
    q, k, v, upper = problem(1, 2, 40, 50, 32)
    mask = torch.zeros(1, 1, 40, 50)
    mask[..., 20:] = torch.finfo(torch.float32).min
    for found, *_ in both((q, k, v, upper), mask, False, 1.0)[1:]:
        assert not found[:, :, 20:].any() and found[:, :, :20].any()
    upper[0, 1, 3, 5] = torch.nan
    assert all(found[0, 1].isnan().any() for found, *_ in both((q, k, v, upper), mask, False, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [-torch.inf, -1e9])
def test_a_query_of_which_a_number_hides_all_keys_weighs_them_alike(dtype: torch.dtype, least: float) -> None:
    """As padding at the left does, by a mask of numbers."""
    q, k, v, upper = problem(1, 2, 40, 50, 32)
    mask = torch.zeros(1, 1, 40, 50, dtype=dtype).masked_fill(torch.rand(1, 1, 40, 50) < 0.5, -1e5)
    mask[..., :7, :] = max(least, torch.finfo(dtype).min)
    alike = mask.clone()
    alike[..., :7, :], q[..., :7, :] = 0, 0
    found, right = both((q, k, v, upper), mask, False, 0.2), both((q, k, v, upper), alike, False, 0.2)
    for (ours, _, _), (_, _, wanted) in zip(found, right, strict=True):
        assert float((ours.double() - wanted).norm()) < 1e-2 * float(wanted.norm())


@pytest.mark.parametrize("change", ["dtype", "dropout", "keys in columns", "groups"])
def test_what_does_not_fit_is_torchs(change: str) -> None:
    q, k, v, upper = problem(1, 2, 33, 33, 16)
    out, lse = FORWARD(q, k, v)
    args: list[Any] = [upper, q, k, v, out, lse, 0.0, False]
    if change == "dtype":
        args = [x.float() if isinstance(x, Tensor) else x for x in args]
    elif change == "dropout":
        args[6] = 0.5
    elif change == "keys in columns":
        args[2] = k.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        args[2], args[3] = k[:, :1], v[:, :1]
    assert not Given(*args).fits()
    if change == "dtype":
        for found, right in zip(bf16_attention_backward(*args), BACKWARD(*args), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("shape", [(2, 3, 70, 90, 40), (1, 2, 600, 33, 64)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_it_allocates_what_it_says(shape: tuple[int, int, int, int, int], dtype: torch.dtype | None) -> None:
    q, k, v, upper = problem(*shape)
    mask = None if dtype is None else torch.zeros(shape[0], 1, 1, shape[3], dtype=dtype)
    mask = None if mask is None else mask.expand(shape[0], 1, shape[2], shape[3])
    out, lse = FORWARD(q, k, v, attn_mask=mask)
    args = (upper, q, k, v, out, lse, 0.0, False, mask, None)
    bf16_attention_backward(*args)
    with torch.profiler.profile(profile_memory=True) as profile:
        results = bf16_attention_backward(*args)
    said = workspace_bytes(bf16_attention_backward.default, args)
    held = sum(x.numel() * x.element_size() for x in results)
    assert said is not None and 0 <= said + held - peak_of_memory_events(profile) <= 64
