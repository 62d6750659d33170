"""Values in few bits: the error of half a step, the bytes, and the workspace as said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from effcompile.core import torch_compat_memory
from effcompile.ops import compress as module
from effcompile.ops.compress import BITS, GROUP, OPERATORS, compress, packed_bytes
from effcompile.ops.workspace import workspace_bytes

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def there_and_back(x: torch.Tensor, bits: int = 8) -> torch.Tensor:
    pack, unpack = OPERATORS[bits]
    return unpack(pack(x, list(x.stride())), list(x.shape), list(x.stride()), x.dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 700),
    dtype=st.sampled_from(FLOATS),
    turned=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 1e3]),
    bits=st.sampled_from(BITS),
)
def test_every_element_is_within_half_a_step(
    rows: int, cols: int, dtype: torch.dtype, turned: bool, spread: float, bits: int
) -> None:
    x = (torch.randn(rows, cols) * spread + 3).to(dtype)
    x = x.t() if turned else x
    found = there_and_back(x, bits)
    assert found.stride() == x.stride()
    assert found.dtype == dtype
    flat, back = (v.as_strided((x.numel(),), (1,)).double() for v in (x, found))
    for begin in range(0, x.numel(), GROUP):
        group, other = flat[begin : begin + GROUP], back[begin : begin + GROUP]
        step = float(group.max() - group.min()) / (2**bits - 1)
        rounding = torch.finfo(dtype).eps * float(group.abs().max()) + 1e-5 * step
        assert float((group - other).abs().max()) <= step / 2 + rounding


def test_it_is_deterministic_and_exact_for_few_levels() -> None:
    x = torch.randint(0, 200, (5, 999)).float()
    assert torch.equal(compress(x, [999, 1]), compress(x, [999, 1]))
    for bits in BITS:
        levels = torch.arange(2.0**bits).repeat(3 * GROUP // 2**bits + (bits < 8))
        assert torch.equal(there_and_back(levels, bits), levels)
    assert torch.equal(there_and_back(torch.full((77,), 1.5)), torch.full((77,), 1.5))


def test_other_strides_are_copied_first() -> None:
    x = torch.randn(30, 40)
    packed = compress(x.t().contiguous().t(), [40, 1])
    assert torch.equal(packed, compress(x, [40, 1]))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 100_000, (1 << 17) + 300, 3 << 17])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
def test_bytes_and_workspace_are_as_said(count: int, dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(count).to(dtype)
    pack, unpack = OPERATORS[bits]
    ours = torch.ops.effcompile

    def peak(run: object) -> int:
        with torch_compat_memory.memory_profile() as profile:
            run()
        return torch_compat_memory.peak_of_memory_events(profile)

    packed = pack(x, [1])
    assert packed.numel() == packed_bytes(count, bits) <= count * bits // 8 + 1 + 8 * (count // GROUP + 1)
    said = workspace_bytes(getattr(ours, f"compress{bits}").default, [x, [1]])
    assert 0 <= said + packed.numel() - peak(lambda: pack(x, [1])) <= 64
    said = workspace_bytes(getattr(ours, f"decompress{bits}").default, [packed, [count], [1], dtype])
    assert 0 <= said + x.numel() * x.element_size() - peak(lambda: unpack(packed, [count], [1], dtype)) <= 64


def test_fake_tensors_have_the_real_shapes() -> None:
    with FakeTensorMode():
        x = torch.empty(7, 300)
        for bits, (pack, unpack) in OPERATORS.items():
            packed = pack(x, [300, 1])
            assert packed.shape == (packed_bytes(2100, bits),)
            assert packed.dtype == torch.uint8
            back = unpack(packed, [7, 300], [1, 7], torch.bfloat16)
            assert back.stride() == (1, 7)
            assert back.dtype == torch.bfloat16
    assert module.workspace_bytes("aten::mm", []) is None
