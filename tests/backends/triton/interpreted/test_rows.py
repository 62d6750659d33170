"""RMSNorm, SwiGLU and rotary positions in the mended interpreter, against float64 through autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from effcompile.backends.triton import rows as tiled
from effcompile.ops.rows import rms_norm, rms_norm_alone, rotary, swiglu

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    tiled.register("cpu")


def make(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def close(dtype: torch.dtype, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype and (got.double() - wanted).norm() <= LIMITS[dtype] * wanted.norm()


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("residual", [True, False])
def test_norm(dtype: torch.dtype, residual: bool) -> None:
    x, other, weight = (
        make(3, 7, 40, seed=1, dtype=dtype),
        make(3, 7, 40, seed=2, dtype=dtype),
        make(40, seed=3, dtype=dtype),
    )
    leaves = (x, other, weight) if residual else (x, weight)
    y, s, _ = rms_norm(x, other if residual else None, weight, 1e-5)
    grads = make(3, 7, 40, seed=4, dtype=dtype).detach(), make(3, 7, 40, seed=5, dtype=dtype).detach()
    found = torch.autograd.grad((y, s), leaves, grads)
    wide = doubles(*leaves)
    total = wide[0] + wide[1] if residual else wide[0]
    total = total + (s.detach().double() - total).detach()  # the sum is rounded before it is normed
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * wide[-1]
    wanted = torch.autograd.grad((expected, total), wide, [g.double() for g in grads])
    close(dtype, (y, *found), (expected, *wanted))


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_norm_alone(dtype: torch.dtype) -> None:
    x, weight = make(3, 7, 40, seed=1, dtype=dtype).detach(), make(40, seed=3, dtype=dtype).detach()
    wide = x.double()
    close(
        dtype,
        (rms_norm_alone(x, weight, 1e-5),),
        (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double(),),
    )


def test_swiglu_reads_halves_of_one_product_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    both = make(2, 5, 66, seed=1).detach()
    copied: list[int] = []
    plain = Tensor.contiguous
    monkeypatch.setattr(Tensor, "contiguous", lambda self: (copied.append(1), plain(self))[1])
    gate, up = both[..., :33], both[..., 33:]
    found = swiglu(gate, up)
    assert not copied
    close(torch.float32, (found,), (silu(gate.double()) * up.double(),))
    transposed = swiglu(gate.transpose(0, 1), up.transpose(0, 1))
    assert torch.equal(transposed, found.transpose(0, 1)) and copied


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_swiglu(dtype: torch.dtype) -> None:
    gate, up, grad = (make(5, 333, seed=i, dtype=dtype) for i in (1, 2, 3))
    y = swiglu(gate, up)
    found = torch.autograd.grad(y, (gate, up), grad.detach())
    wide = doubles(gate, up)
    expected = silu(wide[0]) * wide[1]
    close(dtype, (y, *found), (expected, *torch.autograd.grad(expected, wide, grad.detach().double())))


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(dtype: torch.dtype, batch: int) -> None:
    # (B, H, S, D), strided as a projection's output is
    x = make(2, 5, 3, 24, seed=1, dtype=dtype).transpose(1, 2)
    # not of equal halves: the transpose is what is tested
    cos, sin = (make(batch, 5, 24, seed=i, dtype=dtype).detach() for i in (2, 3))
    grad = make(2, 3, 5, 24, seed=4, dtype=dtype).detach()
    y = rotary(x, cos, sin, False)
    assert y.stride() == x.stride()
    (found,) = torch.autograd.grad(y, x, grad)
    (wide,) = doubles(x)
    turned = torch.cat([-wide[..., 12:], wide[..., :12]], -1)
    expected = wide * cos.double().unsqueeze(1) + turned * sin.double().unsqueeze(1)
    close(dtype, (y, found), (expected, *torch.autograd.grad(expected, wide, grad.double())))


def test_opcheck() -> None:
    torch.library.opcheck(rms_norm, (make(3, 40, seed=1), make(3, 40, seed=2), make(40, seed=3), 1e-6))
    torch.library.opcheck(swiglu, (make(3, 40, seed=1), make(3, 40, seed=2)))
    torch.library.opcheck(
        rotary,
        (make(1, 2, 3, 8, seed=1), make(1, 3, 8, seed=2).detach(), make(1, 3, 8, seed=3).detach(), False),
    )


def test_fp64_is_torchs() -> None:
    gate = make(2, 8, seed=1, dtype=torch.float64)
    assert torch.equal(swiglu(gate, gate), silu(gate) * gate)
