"""Chunked cross entropy: equal to PyTorch's, well behaved as an operator, and what it allocates is what it
says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.ops.loss_head import MEAN, SUM, chunk_rows
from effcompile.ops.workspace import workspace_bytes

ours = torch.ops.effcompile
ALL = [True, True, True]


def problem(
    n: int, v: int, d: int, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(n + v + d)
    x, weight = torch.randn(n, d, dtype=dtype), (0.3 * torch.randn(v, d)).to(dtype)
    return x, weight, torch.randn(v, dtype=dtype) if bias else None, torch.randint(0, v, (n,))


def whole(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: tuple[Any, ...], grad: float
) -> list[Tensor]:
    """loss and gradients by autograd; `form` as the operators take it."""
    reduction, ignore_index, inner, outer, capped = form
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    z = nn.functional.linear(*leaves)
    z = z.float() if x.dtype != torch.float64 else z
    logits = outer * torch.tanh(inner * z) if capped else inner * z
    loss = nn.functional.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="mean" if reduction == MEAN else "sum"
    )
    return [loss.detach(), *torch.autograd.grad(loss * grad, leaves)]


def both(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    form: tuple[Any, ...],
    chunks: int,
    grad: float,
) -> list[list[Tensor]]:
    """loss and gradients, first of the one-pass operator, then of the recomputing pair."""
    args = (x, weight, bias, target)
    loss, *gradients = ours.loss_head_gradients(*args, *form, chunks, ALL)
    again, lse = ours.loss_head_forward(*args, *form, chunks)
    recomputed = ours.loss_head_backward(torch.tensor(grad, dtype=loss.dtype), *args, lse, *form, chunks, ALL)
    wanted = 3 if bias is not None else 2
    return [[loss, *(g * grad for g in gradients[:wanted])], [again, *recomputed[:wanted]]]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        if b.isnan().any():
            assert a.isnan().all()
        else:
            assert float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm()) + 1e-12


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70), v=st.integers(2, 60), d=st.integers(1, 20), chunks=st.integers(1, 80),
    bias=st.booleans(), reduction=st.sampled_from([MEAN, SUM]), capped=st.booleans(),
    inner=st.sampled_from([1.0, 0.5]), ignored=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)  # fmt: skip
def test_equals_cross_entropy_at_every_chunk_boundary(
    n: int,
    v: int,
    d: int,
    chunks: int,
    bias: bool,
    reduction: int,
    capped: bool,
    inner: float,
    ignored: tuple[int, int],
) -> None:
    x, weight, b, target = problem(n, v, d, torch.float64, bias=bias)
    # whole chunks without a label among them; sometimes all of them
    target[min(ignored) : max(ignored)] = -100
    form = (reduction, -100, inner, 1.5 if capped else 1.0, capped)
    expected = whole(x, weight, b, target, form, 1.7)
    for got in both(x, weight, b, target, form, chunks, 1.7):
        assert_close(got, expected, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_precisions(dtype: torch.dtype, tolerance: float, chunks: int) -> None:
    x, weight, bias, target = problem(77, 301, 48, dtype)
    target[20:40] = -100
    for form in ((MEAN, -100, 1.0, 1.0, False), (SUM, -100, 0.5, 3.0, True)):
        expected = whole(x, weight, bias, target, form, 1.5)
        for got in both(x, weight, bias, target, form, chunks, 1.5):
            assert [g.dtype for g in got[1:]] == [dtype] * 3
            assert_close(got, expected, tolerance)


def test_a_chunk_without_labels_gets_no_gradient_and_none_at_all_a_nan_mean() -> None:
    x, weight, bias, target = problem(64, 50, 8)
    target[32:] = -100
    _, dx, _, _ = ours.loss_head_gradients(x, weight, bias, target, MEAN, -100, 1.0, 1.0, False, 2, ALL)
    assert dx[:32].abs().min() > 0 and not dx[32:].any()
    loss, *gradients = ours.loss_head_gradients(
        x, weight, bias, target.fill_(-100), MEAN, -100, 1.0, 1.0, False, 2, ALL
    )
    assert loss.isnan() and not any(g.any() for g in gradients)


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    x, weight, bias, target = problem(40, 30, 8, torch.float64)
    x, form = x * 1e4, (MEAN, -100, 1.0, 1.0, False)
    expected = whole(x, weight, bias, target, form, 1.0)
    for got in both(x, weight, bias, target, form, 4, 1.0):
        assert_close(got, expected, 1e-9)


def test_gradients_that_nobody_wants_are_empty() -> None:
    x, weight, bias, target = problem(40, 30, 8)
    form = (MEAN, -100, 1.0, 1.0, False)
    for i in range(3):
        needs = [i == j for j in range(3)]
        _, *got = ours.loss_head_gradients(x, weight, bias, target, *form, 2, needs)
        assert [g.numel() > 0 for g in got] == needs


def test_a_weight_in_other_strides_and_a_wrong_label() -> None:
    x, weight, bias, target = problem(40, 30, 8)
    form = (MEAN, -100, 1.0, 1.0, False)
    turned = weight.t().contiguous().t()
    for got in both(x, turned, bias, target, form, 3, 1.0):
        assert got[2].stride() == turned.stride()
        assert_close(got, whole(x, weight, bias, target, form, 1.0), 1e-6)
    for wrong in (30, -5):
        target[7] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            ours.loss_head_gradients(x, weight, bias, target, *form, 3, ALL)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("capped", [True, False])
def test_opcheck(bias: bool, capped: bool) -> None:
    x, weight, b, target = problem(40, 30, 8, bias=bias)
    form = (MEAN, -100, 0.5, 2.0, capped)
    lse, grad = torch.randn(40, 1).abs() + 5, torch.tensor(1.5)
    torch.library.opcheck(ours.loss_head_gradients.default, (x, weight, b, target, *form, 3, ALL))
    torch.library.opcheck(ours.loss_head_forward.default, (x, weight, b, target, *form, 3))
    torch.library.opcheck(ours.loss_head_backward.default, (grad, x, weight, b, target, lse, *form, 3, ALL))


def traced(target: Any, args: tuple[Any, ...]) -> int:
    """Bytes beyond inputs and outputs at the operator's highest instant, by the CPU allocator's trace."""
    target(*args)
    with torch.profiler.profile(profile_memory=True) as profile:
        result = target(*args)
    return peak_of_memory_events(profile) - sum(t.nbytes for t in result)


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("n", "v", "d", "dtype", "chunks"),
    [
        (77, 997, 96, torch.float32, 1),
        (77, 997, 96, torch.float32, 3),
        (77, 997, 96, torch.float64, 8),
        (130, 3001, 16, torch.float32, 4),
        (96, 50257, 8, torch.bfloat16, 1),
        (100, 5003, 48, torch.bfloat16, 3),
        (50, 997, 16, torch.float16, 2),
    ],
)
def test_workspace_equals_the_allocators_trace(
    n: int, v: int, d: int, dtype: torch.dtype, chunks: int, bias: bool, capped: bool
) -> None:
    x, weight, b, target = problem(n, v, d, dtype, bias=bias)
    args = (x, weight, b, target, MEAN, -100, 0.5, 2.0, capped, chunks)
    lse = torch.randn(n, 1, dtype=torch.float64 if dtype == torch.float64 else torch.float32) + 9
    backward = (torch.tensor(1.0), *args[:4], lse, *args[4:], ALL)
    for name, operands in (
        ("loss_head_gradients", (*args, ALL)),
        ("loss_head_forward", args),
        ("loss_head_backward", backward),
    ):
        target_op = getattr(ours, name).default
        predicted, measured = workspace_bytes(target_op, operands), traced(target_op, operands)
        assert predicted is not None
        assert measured <= predicted <= measured + 24, name


def test_workspace_follows_the_chunks_and_knows_only_our_operators() -> None:
    args = (*problem(64, 5000, 4), MEAN, -100, 1.0, 1.0, False)
    sizes = [workspace_bytes(ours.loss_head_gradients.default, (*args, chunks, ALL)) for chunks in (1, 2, 4)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[2] == 48 * 5000 * 4  # type: ignore[type-var, operator]
    assert workspace_bytes(torch.ops.aten.mm.default, args[:2]) is None
    assert chunk_rows(65, 4) == 17


@pytest.mark.parametrize(
    ("change", "words"),
    [((3, torch.zeros(2, dtype=torch.long)), "target (2,)"), ((2, torch.zeros(3)), "bias"), ((4, 0), "mean")],
)
def test_wrong_arguments_are_named(change: tuple[int, Any], words: str) -> None:
    args: list[Any] = [*problem(40, 30, 8), MEAN, -100, 1.0, 1.0, False, 2]
    args[change[0]] = change[1]
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        ours.loss_head_forward(*args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x, weight, bias, target = (t.cuda() for t in problem(77, 3001, 48, dtype) if t is not None)
    form = (MEAN, -100, 0.5, 3.0, True)
    expected = whole(x, weight, bias, target, form, 1.5)
    for got in both(x, weight, bias, target, form, 3, 1.5):
        assert_close(got, expected, 1e-5 if dtype == torch.float32 else 1e-2)
