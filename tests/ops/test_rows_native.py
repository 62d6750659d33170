"""The compiled norms, gates and rotations against their definition in float64, whatever the shape
and layout.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.machine import instructions, native
from effcompile.ops import group_native, rows, rows_native
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.instruction_sets import WORDS

DRAWN = {"max_examples": 40, "deadline": None}
sizes = st.integers(1, 70)


@pytest.fixture(params=["here", *instructions.integer_isas(), "by torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has, and none."""
    if request.param == "by torch":
        monkeypatch.setattr(rows_native, "kernels", lambda: "asked for")
    elif request.param != "here":
        made = rows_native.RowKernels(request.param)
        monkeypatch.setattr(rows_native, "kernels", lambda: made)
    return str(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted.double(), rtol=3e-6, atol=1e-6, equal_nan=True)


@settings(**DRAWN)
@given(
    batch=st.integers(1, 3),
    count=st.integers(1, 5),
    width=sizes,
    summed=st.booleans(),
    threads=st.integers(1, 2),
)
def test_a_norm(batch: int, count: int, width: int, summed: bool, threads: int) -> None:
    x, residual, weight = (
        drawn(batch, count, width),
        drawn(batch, count, width, seed=1) if summed else None,
        drawn(width, seed=2),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y, total = rows_native.rms_norm(x, residual, weight, 1e-5)
    finally:
        torch.set_num_threads(before)
    wide = x.double() if residual is None else (x + residual).double()
    close(y, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    assert torch.equal(total, x if residual is None else x + residual)


@settings(**DRAWN)
@given(count=st.integers(1, 5), width=sizes)
def test_a_gate(count: int, width: int) -> None:
    gate, up = 8 * drawn(count, width), drawn(count, width, seed=1)
    close(rows_native.swiglu(gate, up), gate.double() * torch.sigmoid(gate.double()) * up)


@settings(**DRAWN)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    count=st.integers(1, 5),
    half=st.integers(1, 35),
    turned=st.booleans(),
    one=st.booleans(),
)
def test_a_rotation(batch: int, heads: int, count: int, half: int, turned: bool, one: bool) -> None:
    x = (
        drawn(batch, count, heads, 2 * half).transpose(1, 2)
        if turned
        else drawn(batch, heads, count, 2 * half)
    )
    cos, sin = (
        drawn(1 if one else batch, count, 2 * half, seed=1),
        drawn(1 if one else batch, count, 2 * half, seed=2),
    )
    found = rows_native.rotary(x, cos, sin)
    wide = x.double()
    other = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    close(found, wide * cos[:, None] + other * sin[:, None])
    assert found.stride() == torch.empty_like(x).stride()


def test_every_instruction_set(isa: str) -> None:
    """And what is not finite stays in its row."""
    x, residual, weight = drawn(4, 3, 37), drawn(4, 3, 37, seed=1), drawn(37, seed=2)
    x[1, 0, 5], x[2, 1, 36] = torch.nan, torch.inf
    for found, right in zip(
        rows_native.rms_norm(x, residual, weight, 1e-6),
        rows.rms_norm_by_torch(x, residual, weight, 1e-6)[:2],
        strict=True,
    ):
        close(found, right)
    close(rows_native.rms_norm_alone(x, weight, 1e-6), rows.rms_norm_by_torch(x, None, weight, 1e-6)[0])
    close(rows_native.swiglu(x, residual), rows.swiglu_by_torch(x, residual))
    q, cos = drawn(2, 3, 4, 10).transpose(1, 2), drawn(2, 3, 10)
    close(rows_native.rotary(q, cos, cos), rows.rotary_by_torch(q, cos, cos, False))


@pytest.mark.parametrize(
    "change",
    [lambda t: t.double(), lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t.bfloat16()],
)
def test_what_the_kernels_do_not_take_is_torchs(change) -> None:  # type: ignore[no-untyped-def]
    x, y, weight = (
        change(drawn(4, 3, 12)),
        change(drawn(4, 3, 12, seed=1)),
        drawn(12, seed=2).to(change(drawn(4, 3, 12)).dtype),
    )
    assert torch.equal(
        rows_native.rms_norm(x, y, weight, 1e-5)[0], rows.rms_norm_by_torch(x, y, weight, 1e-5)[0]
    )
    assert torch.equal(rows_native.swiglu(x, y), rows.swiglu_by_torch(x, y))


@pytest.mark.skipif("avx2" not in instructions.integer_isas(), reason="this processor has no AVX2")
def test_wrong_kernels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows_native.RowKernels("avx2")
    right = rows_native.RowKernels.swiglu
    assert made.objection() is None
    monkeypatch.setattr(rows_native.RowKernels, "swiglu", lambda *arguments: right(*arguments) * 1.01)
    assert "wrong norm" in str(made.objection())


@pytest.mark.parametrize(
    "isa_name",
    [isa for isa in sorted(group_native.TILES) if isa.startswith("neon") == instructions.on_arm()],
)
def test_every_instruction_set_compiles(isa_name: str) -> None:
    if isinstance(rows_native.kernels(), str):
        pytest.skip("there is no compiler, or this processor has no such kernels")
    assert native.compiled(rows_native._SOURCE, {"WIDTH": WORDS[isa_name]}, isa_name).exists()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    d=st.integers(1, 200),
    weighted=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_residual_sum_with_its_layer_norm(
    rows: int, d: int, weighted: bool, biased: bool, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x, residual = (3 + torch.randn(1, rows, d, generator=drawn) for _ in range(2))
    weight, bias = (torch.randn(d, generator=drawn) if given else None for given in (weighted, biased))
    wanted = F.layer_norm(
        (x + residual).double(), (d,), *(t if t is None else t.double() for t in (weight, bias))
    )
    found = add_layer_norm(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * (1 + rows))
    x[0, 0, 0] = torch.nan
    assert add_layer_norm(x, residual, weight, bias, 1e-5)[0, 0].isnan().all()
    turned = x.transpose(1, 2)
    wide = residual.transpose(1, 2)
    assert add_layer_norm(turned, wide, None, None, 1e-5).shape == turned.shape
