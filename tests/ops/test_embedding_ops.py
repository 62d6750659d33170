"""An embedding's gradient added into another: equal to aten's, padding spared, memory as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.core.errors import UsageError
from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.ops.workspace import workspace_bytes

into = torch.ops.effcompile.embedding_backward_into
aten = torch.ops.aten


@settings(max_examples=40, deadline=None)
@given(
    v=st.integers(1, 20), d=st.integers(1, 9), shape=st.sampled_from([(7,), (2, 5), (3, 1, 4), (60,)]),
    padded=st.booleans(), by_frequency=st.booleans(), narrow=st.booleans(),
)  # fmt: skip
def test_adds_atens_gradient(
    v: int, d: int, shape: tuple[int, ...], padded: bool, by_frequency: bool, narrow: bool
) -> None:
    torch.manual_seed(v + d)
    dtype = torch.bfloat16 if narrow else torch.float64
    table, grad, indices = (
        torch.randn(v, d, dtype=dtype),
        torch.randn(*shape, d, dtype=dtype),
        torch.randint(0, v, shape),
    )
    padding = v // 2 if padded else -1
    expected = table.double() + aten.embedding_dense_backward(
        grad.double(), indices, v, padding, by_frequency
    )
    got, spared = table.clone(), table[padding].clone()
    assert into(got, grad, indices, padding, by_frequency) is None
    assert not padded or torch.equal(got[padding], spared)
    assert (got.double() - expected).norm() <= (8e-3 if narrow else 1e-13) * (
        table.double().norm() + grad.double().norm()
    )


def test_many_small_rows_are_not_lost_in_bf16() -> None:
    """4096 times 2⁻⁸ onto 8: in bf16 8 + 2⁻⁸ is 8."""
    table = torch.full((3, 4), 8.0, dtype=torch.bfloat16)
    into(
        table,
        torch.full((4096, 4), 2.0**-8, dtype=torch.bfloat16),
        torch.ones(4096, dtype=torch.long),
        -1,
        False,
    )
    assert torch.equal(table[1], torch.full((4,), 24.0, dtype=torch.bfloat16)) and torch.equal(
        table[0], table[2]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(
        into.default,
        (
            torch.randn(9, 4, dtype=dtype),
            torch.randn(2, 5, 4, dtype=dtype),
            torch.randint(0, 9, (2, 5)),
            3,
            False,
        ),
    )


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(UsageError, match=r"gradient \(2, 5, 3\)"):
        into(torch.randn(9, 4), torch.randn(2, 5, 3), torch.randint(0, 9, (2, 5)), -1, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_frequency", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("padding", [-1, 3])
def test_workspace_equals_the_allocators_trace(
    dtype: torch.dtype, by_frequency: bool, whole: bool, padding: int
) -> None:
    grad = (
        torch.randn(2, 500, 96, dtype=dtype)
        if whole
        else torch.randn(500, 2, 96, dtype=dtype).transpose(0, 1)
    )
    args: tuple[Any, ...] = (
        torch.randn(700, 96, dtype=dtype),
        grad,
        torch.randint(0, 700, (2, 500)),
        padding,
        by_frequency,
    )
    into(*args)
    with torch.profiler.profile(profile_memory=True) as profile:
        into(*args)
    predicted, measured = workspace_bytes(into.default, args), peak_of_memory_events(profile)
    assert predicted is not None and abs(predicted - measured) <= max(0.01 * measured, 600)
