"""Linears with weights of 4 and 8 bits in groups in the mended interpreter, against their definition in
emulated arithmetic: integers in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.backends.triton import group_linear as tiled
from effcompile.ops.group_codes import pack, quantize


def emulated(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x rounded to 127 steps a group of 32, whole products, scales behind them."""
    rows, k = x.shape
    y = torch.zeros(rows, len(codes), dtype=torch.float64)
    for group, start in enumerate(range(0, k, 32)):
        part = x[:, start : start + 32]
        most = part.abs().amax(1, keepdim=True)
        # one division: torch divides a number by a tensor in two steps
        steps = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, 0.0)
        whole = (part * steps).round().double()
        sums = whole @ codes[:, start : start + 32].double().T
        y += sums * scales[:, group].double() * torch.where(most > 1e-30, most / 127, 0.0).double()
    return y if bias is None else y + bias.double()


AFTER = {
    "none": lambda z: z,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
}


@settings(
    max_examples=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    rows=st.integers(1, 17), k=st.integers(1, 300), n=st.integers(1, 70), bits=st.sampled_from([4, 8]),
    biased=st.booleans(), after=st.sampled_from(list(AFTER)), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_it_is_the_emulated_product(
    rows: int, k: int, n: int, bits: int, biased: bool, after: str, seed: int
) -> None:
    """Ragged sizes, rows of zeros; x that lies with its rows apart."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, k + 5), (n, k), (n,)))
    x, bias_or_none = x[:, :k], bias if biased else None
    x[rows // 2, : k // 2] = 0.0
    codes, scales = quantize(weight, bits)
    found = tiled.linear(x, pack(codes, scales, bits), n, bias_or_none, after)
    before = emulated(x, codes, scales, bias_or_none)
    assert found is not None and found.dtype is torch.float32
    # Of the sums: GELU of -6.5 is -6e-11, of which float32 has nothing left beside 1 + erf.
    assert (found.double() - AFTER[after](before)).norm() <= 2e-6 * before.norm().clamp(min=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_codes_and_what_is_no_number(bits: int) -> None:
    """Of 96 columns all codes and steps at their ends; a row with an infinity or NaN is NaN, no other."""
    codes = torch.full((16, 96), -8 if bits == 4 else -127, dtype=torch.int8)
    codes[1::2] = 7 if bits == 4 else 127
    packed = pack(codes, torch.full((16, 3), 0.5, dtype=torch.bfloat16), bits)
    x = torch.ones(4, 96)
    x[2, 40], x[3, 95] = math.inf, math.nan
    found = tiled.linear(x, packed, 16, None, "none")
    assert found is not None and found[2:].isnan().all()
    torch.testing.assert_close(found[:2], (codes.float() * 0.5).sum(1).expand(2, -1), rtol=1e-6, atol=0)


def test_leading_axes_and_no_rows() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    packed = pack(*quantize(weight, 8), 8)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    found, flat = (tiled.linear(each, packed, 20, None, "none") for each in (x, x.view(6, 64)))
    assert found is not None and flat is not None and torch.equal(found.view(6, 20), flat)
    none = tiled.linear(x[:0], packed, 20, None, "none")
    assert none is not None and none.shape == (0, 3, 20)
