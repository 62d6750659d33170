"""Codes and quantised linears in the mended interpreter: codes equal torch's, products against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from effcompile.backends.triton import group_quant as tiled
from effcompile.ops.group_quant import (
    LARGEST,
    dequantize_by_torch,
    dequantize_groups,
    linear_by_torch,
    pack_int4,
    quantize_by_torch,
    quantize_groups,
    quantized_linear,
    unpack_int4,
)

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("group", [24, 64])
def test_codes_are_torchs(dtype: torch.dtype, group: int) -> None:
    """The same numbers, bit by bit: the mended interpreter rounds as torch does."""
    x = make(3, 5, 192, dtype=torch.bfloat16) * 10.0 ** torch.arange(-3, 2)[:, None]
    x[0, 0] = 0.0
    x = x.bfloat16()
    codes, scales = tiled.quantize(x, group, dtype)
    expected, expected_scales = quantize_by_torch(x, group, dtype)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
    # a scale's last bit may move a code that lies between two
    assert (codes.float() == expected.float()).double().mean() > 0.999
    back = tiled.dequantize(codes, scales, torch.float32)
    assert torch.equal(back, dequantize_by_torch(codes, scales, torch.float32))
    step = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[dtype]
    error = (back - x.float()).unflatten(-1, (-1, group)).abs().amax(-1)
    assert (error <= step * 1.01 * x.float().unflatten(-1, (-1, group)).abs().amax(-1)).all()


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    for dtype in LIMITS:
        yield (
            f"int8 {dtype}",
            {"x": make(37, 192, dtype=dtype), "bits": 8, "groups": 3, "activation": "gelu", "dtype": dtype},
        )
        yield (
            f"int4 {dtype}",
            {"x": make(37, 192, dtype=dtype), "bits": 4, "groups": 6, "activation": "silu", "dtype": dtype},
        )
    codes = torch.randint(-127, 128, (37, 192), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    x_scales = make(37, 1, seed=2).abs()
    yield (
        "int8 times int8",
        {
            "x": codes,
            "x_scales": x_scales,
            "bits": 8,
            "groups": 1,
            "activation": "none",
            "dtype": torch.float32,
        },
    )
    narrow = {
        "x": make(37, 192, seed=1).to(torch.float8_e4m3fn),
        "x_scales": x_scales,
        "bits": 0,
        "groups": 1,
    }
    yield "float8 times float8", {**narrow, "activation": "silu", "dtype": torch.bfloat16}
    yield (
        "float8 weight",
        {"x": make(37, 192), "bits": 0, "groups": 3, "activation": "none", "dtype": torch.float32},
    )


@pytest.mark.parametrize(("name", "form"), list(forms()), ids=lambda f: f if isinstance(f, str) else "")
def test_linear(name: str, form: dict[str, Any]) -> None:
    x, n, k = form["x"], 45, 192
    top = 2 ** (form["bits"] - 1) if form["bits"] else 4
    codes = torch.randint(1 - top, top, (n, k), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    codes = codes if form["bits"] else (codes / 8).to(torch.float8_e4m3fn)
    scales, x_scales = make(n, form["groups"], seed=4).abs() / top, form.get("x_scales")
    bias, residual = make(n, seed=5, dtype=form["dtype"]), make(37, n, seed=6, dtype=form["dtype"])
    stored = pack_int4(codes) if form["bits"] == 4 else codes
    got = tiled.linear(x, stored, scales, x_scales, bias, residual, form["activation"], form["dtype"])
    weight = (codes.double().unflatten(1, (form["groups"], -1)) * scales.double().unsqueeze(2)).flatten(1)
    z = (x.double() if x_scales is None else x.double() * x_scales.double()) @ weight.T + bias.double()
    after = {"none": lambda t: t, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[
        form["activation"]
    ](z)
    wanted = after + residual.double()
    assert (got.double() - wanted).norm() <= LIMITS[form["dtype"]] * wanted.norm()
    default = linear_by_torch(x, stored, scales, x_scales, bias, residual, form["activation"], form["dtype"])
    assert (default.double() - wanted).norm() <= LIMITS[form["dtype"]] * wanted.norm()


def test_a_gpu_without_float8_has_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100's compiler refuses e4m3fn: neither codes nor products may reach it."""
    x, wanted = make(3, 64), quantize_by_torch(make(3, 64), 32, torch.float8_e4m3fn)
    monkeypatch.setattr(tiled, "_lacks", lambda dtype, device: dtype == torch.float8_e4m3fn)
    for kernel in ("quantize_kernel", "dequantize_kernel", "quantized_product"):
        monkeypatch.setattr(tiled, kernel, None)
    codes, scales = tiled.quantize(x, 32, torch.float8_e4m3fn)
    torch.testing.assert_close((codes.float(), scales), (wanted[0].float(), wanted[1]))
    assert torch.equal(
        tiled.dequantize(codes, scales, torch.float32), dequantize_by_torch(*wanted, torch.float32)
    )
    tiled.linear(x, codes, scales, None, None, None, "none", torch.float32)


def test_packing() -> None:
    codes = torch.randint(-8, 8, (5, 12), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)


def test_operators_registered() -> None:
    """opcheck, and the gradients through each activation, with the tiled kernels as the operators' own."""
    tiled.register("cpu")
    torch.library.opcheck(quantize_groups, (make(2, 64), 32, torch.int8))
    codes, scales = quantize_groups(make(16, 64, seed=1), 32, torch.int8)
    torch.library.opcheck(dequantize_groups, (codes, scales, torch.bfloat16))
    weight = dequantize_groups(codes, scales, torch.float32)
    for activation, same in (
        ("none", lambda t: t),
        ("gelu", torch.nn.functional.gelu),
        ("silu", torch.nn.functional.silu),
    ):
        x, bias, residual = (
            t.requires_grad_() for t in (make(3, 64, seed=2), make(16, seed=3), make(3, 16, seed=4))
        )
        args = (x, codes, scales, None, bias, residual, activation, torch.float32)
        if activation == "gelu":
            torch.library.opcheck(quantized_linear, args)
        found = torch.autograd.grad(quantized_linear(*args).square().sum(), (x, bias, residual))
        expected = torch.autograd.grad(
            (same(x @ weight.T + bias) + residual).square().sum(), (x, bias, residual)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
