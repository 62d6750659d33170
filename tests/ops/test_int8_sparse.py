"""Sparse linears in 8 bits: to the bit what the dense ones give of the same codes, whatever shape, pattern,
instruction set and threads.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core import torch_compat_memory
from effcompile.core.errors import UsageError
from effcompile.machine import instructions
from effcompile.ops import int8_codes
from effcompile.ops import int8_sparse as module
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_sparse import fallback_reason, int8_sparse_linear, told
from effcompile.ops.sparse_codes import SparseCodes
from effcompile.ops.workspace import workspace_bytes
from effcompile.sparse.forms import coded_bytes


@pytest.fixture(params=["here", *instructions.integer_isas(), "by torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has, narrow ones too."""
    if request.param == "by torch":
        monkeypatch.setattr(module, "kernels", lambda: "asked for")
    elif request.param != "here":
        made = module.SparseByteKernels(request.param)
        monkeypatch.setattr(module, "kernels", lambda: made)
    return str(request.param)


def pruned(n: int, k: int, block: int, share: float, seed: int) -> Tensor:
    """Codes (N, K) of which some blocks are kept."""
    drawn = torch.Generator().manual_seed(seed)
    grid = torch.rand(-(-n // block), -(-k // block), generator=drawn) < share
    mask = grid.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]
    return torch.randint(-127, 128, (n, k), generator=drawn).to(torch.int8) * mask


def rows(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 130),
    k=st.integers(1, 200),
    n=st.integers(1, 200),
    block=st.sampled_from([1, 4, 8, 16, 32]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    after=st.sampled_from(int8_codes.AFTER),
    threads=st.integers(1, 3),
)
def test_it_is_the_dense_one_to_the_bit(
    m: int, k: int, n: int, block: int, share: float, after: str, threads: int
) -> None:
    codes, x, scales = pruned(n, k, block, share, m), rows(m, k), rows(1, n)[0].abs() + 0.1
    bias = rows(2, n)[1] if m % 2 else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        held = SparseCodes.of(codes)
        found = int8_sparse_linear(x, *held.tensors, scales, block, 0, bias, after)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(held.dense(n, k), codes)
    right = int8_linear(x, int8_codes.pack(codes), scales, bias, after)
    if bias is None and after == "none":
        assert torch.equal(found, right)
    # what is added and what follows may be contracted otherwise by their compiler
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-5)


def test_every_instruction_set_gives_the_same_integers(isa: str) -> None:
    codes, x, scales = pruned(53, 70, 8, 0.3, 0), rows(37, 70), rows(1, 53)[0].abs()
    x[0], x[1, 3] = 1e30, -127.0  # a row of the largest codes
    found = int8_sparse_linear(x, *SparseCodes.of(codes).tensors, scales, 8, 0)
    assert torch.equal(found, int8_codes.linear_by_torch(x, int8_codes.pack(codes), scales, None, "none"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(isa: str, bad: float) -> None:
    x = rows(20, 40)
    x[7, 3] = bad
    made = int8_sparse_linear(x, *SparseCodes.of(pruned(30, 40, 4, 0.3, 0)).tensors, torch.ones(30), 4, 0)
    assert made[7].isnan().all() and made[[*range(7), *range(8, 20)]].isfinite().all()


def test_wrong_indices_and_shapes_are_told() -> None:
    held, x, scales = SparseCodes.of(pruned(40, 40, 4, 0.4, 1)), rows(5, 40), torch.ones(40)
    values, quads, starts, sums = held.tensors
    for bad in (
        (values, quads + 9, starts, sums),
        (values, quads - 1, starts, sums),
        (values, quads, starts.flip(0), sums),
    ):
        with pytest.raises(UsageError, match="indices"):
            int8_sparse_linear(x, *bad, scales, 4, 0)
    for wrong in ((x.double(), held, scales), (x, held, scales[:3])):
        with pytest.raises(UsageError, match="SparseCodes"):
            int8_sparse_linear(wrong[0], *wrong[1].tensors, wrong[2], 4, 0)
    with pytest.raises(UsageError, match="tanh"):
        int8_sparse_linear(x, *held.tensors, scales, 4, 0, None, "tanh")


def test_torch_can_trace_and_count_it(isa: str) -> None:
    held, x = SparseCodes.of(pruned(40, 40, 4, 0.4, 1)), rows(6, 40).view(2, 3, 40)
    arguments = (x, *held.tensors, torch.ones(40), 4, 0)
    opcheck(int8_sparse_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counted:
        int8_sparse_linear(*arguments)
    assert counted.get_total_flops() == 2 * 6 * 64 * len(held.quads)


def test_workspace_is_what_the_allocator_hands_out() -> None:
    held, x = SparseCodes.of(pruned(40, 40, 4, 0.4, 1)), rows(70, 40)
    arguments = (x, *held.tensors, torch.ones(40), 4, 0)
    int8_sparse_linear(*arguments)
    with torch_compat_memory.watched_memory("cpu") as peak:
        int8_sparse_linear(*arguments)
    if fallback_reason() is None:
        assert workspace_bytes(int8_sparse_linear.default, arguments) == peak() - 4 * 70 * 40
    assert told()


@pytest.mark.parametrize("block", [1, 4, 8, 16, 32, 64])
def test_its_bytes_are_foreseen(block: int) -> None:
    grid = torch.rand(128 // block, 192 // block, generator=torch.Generator().manual_seed(0)) < 0.3
    mask = grid.repeat_interleave(block, 0).repeat_interleave(block, 1)
    held = SparseCodes.of(mask.to(torch.int8))
    assert coded_bytes(grid, block) == sum(t.nbytes for t in held.tensors) + 4 * 128
