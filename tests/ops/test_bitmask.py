"""Boolean tensors as bits: they come back as they were, in an eighth of the bytes, with the workspace as
said.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from effcompile.core import torch_compat_memory
from effcompile.ops import bitmask as module
from effcompile.ops.bitmask import packed_bytes, to_bits, to_booleans
from effcompile.ops.workspace import workspace_bytes

SLAB = 1 << 17


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 700),
    turned=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_it_comes_back_as_it_was(rows: int, cols: int, turned: bool, share: float) -> None:
    x = torch.rand(rows, cols) < share
    x = x.t() if turned else x
    packed = to_bits(x, list(x.stride()))
    found = to_booleans(packed, list(x.shape), list(x.stride()), torch.bool)
    assert found.dtype == torch.bool and found.stride() == x.stride() and torch.equal(found, x)
    assert set(found.reshape(-1).view(torch.uint8).tolist()) <= {0, 1}


def test_the_first_element_is_in_the_lowest_bit() -> None:
    x = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert to_bits(x, [1]).tolist() == [0b01000001, 0b110]


def test_other_strides_are_copied_first() -> None:
    x = torch.rand(30, 40) < 0.5
    assert torch.equal(to_bits(x.t().contiguous().t(), [40, 1]), to_bits(x, [40, 1]))


def test_numbers_seen_as_booleans_are_true_where_they_are_not_zero() -> None:
    numbers = torch.tensor([0, 255, 2, 0, 1, 128, 0, 7, 9], dtype=torch.uint8)
    found = to_booleans(to_bits(numbers.view(torch.bool), [1]), [9], [1], torch.bool)
    assert found.tolist() == [n != 0 for n in numbers.tolist()]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, SLAB - 1, SLAB, SLAB + 13, 3 * SLAB])
def test_bytes_and_workspace_are_as_said(count: int) -> None:
    x = torch.rand(count) < 0.3

    def peak(run: object) -> int:
        with torch_compat_memory.memory_profile() as profile:
            run()
        return torch_compat_memory.peak_of_memory_events(profile)

    packed = to_bits(x, [1])
    assert packed.numel() == packed_bytes(count) == -(-count // 8)
    assert torch.equal(to_booleans(packed, [count], [1], torch.bool), x)
    said = workspace_bytes(torch.ops.effcompile.to_bits.default, [x, [1]])
    assert 0 <= said + packed.numel() - peak(lambda: to_bits(x, [1])) <= 64
    said = workspace_bytes(torch.ops.effcompile.to_booleans.default, [packed, [count], [1], torch.bool])
    assert 0 <= said + count - peak(lambda: to_booleans(packed, [count], [1], torch.bool)) <= 64


def test_fake_tensors_have_the_real_shapes() -> None:
    with FakeTensorMode():
        packed = to_bits(torch.empty(7, 300, dtype=torch.bool), [300, 1])
        assert packed.shape == (263,) and packed.dtype == torch.uint8
        back = to_booleans(packed, [7, 300], [1, 7], torch.bool)
        assert back.stride() == (1, 7) and back.dtype == torch.bool
    assert module.workspace_bytes("aten::mm", []) is None
