"""Values in 8 bits on the kernels: the same bytes as torch's, in any dense strides, ragged and constant
groups.
"""

from __future__ import annotations

import pytest
import torch

from effcompile.backends.triton import compress as tiled
from effcompile.ops.compress import GROUP, packed_bytes, parts

by_torch, from_torch = tiled.op.compress._init_fn, tiled.op.decompress._init_fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 131, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(0, 1)
    x[2] = 1.5  # groups of one value have no step
    packed, expected = tiled.compress(x, list(x.stride())), by_torch(x, list(x.stride()))
    assert packed.shape == (packed_bytes(x.numel()),)
    steps, codes = parts(packed, x.numel())
    other_steps, other_codes = parts(expected, x.numel())
    torch.testing.assert_close(steps, other_steps, rtol=1e-6, atol=0.0)
    # a step's last bit may move a code that lies between two
    assert (codes != other_codes).double().mean() < 1e-3
    back = tiled.decompress(expected, list(x.shape), list(x.stride()), dtype)
    assert back.stride() == x.stride()
    torch.testing.assert_close(
        back, from_torch(expected, list(x.shape), list(x.stride()), dtype), rtol=2e-3, atol=1e-6
    )
    flat, made = (t.transpose(0, 1).reshape(-1).double() for t in (x, back))
    bound = 0.51 * steps[:, 1].double().repeat_interleave(GROUP)[: flat.numel()] + 0.01 * flat.abs()
    assert ((flat - made).abs() <= bound).all()


def test_other_strides_are_copied_and_nothing_is_nothing() -> None:
    x = torch.randn(4, 300).t()
    packed = tiled.compress(x, [4, 1])
    torch.testing.assert_close(packed, tiled.compress(x.contiguous(), [4, 1]))
    empty = torch.empty(0, 8)
    assert tiled.decompress(tiled.compress(empty, [8, 1]), [0, 8], [8, 1], torch.float32).shape == (0, 8)


def test_registered() -> None:
    tiled.register("cpu")
    x = torch.randn(2, 300)
    torch.library.opcheck(tiled.op.compress, (x, [300, 1]))
    torch.library.opcheck(
        tiled.op.decompress, (tiled.op.compress(x, [300, 1]), [2, 300], [300, 1], torch.float32)
    )
