"""Updates on states of 8 bits: against float64, against torchao's own optimizer step by step, and its
state_dict both ways.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.optim import Adam8bit, AdamW8bit
from torchao.optim.quant_utils import create_dynamic_map

from effcompile.backends.triton import states8 as tiled
from effcompile.ops import states8 as op
from effcompile.ops.lion8 import Lion8bit
from effcompile.ops.states8 import BLOCK

SIGNED, UNSIGNED = (torch.tensor(create_dynamic_map(signed=s)) for s in (True, False))
N = 5 * BLOCK  # no multiple of what a program takes
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def made(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """p, gradient, codes and scales of two moments: a block of zeros, one of tiny numbers, one with a single
    large one.
    """
    torch.manual_seed(0)
    p, grad = torch.randn(N).to(dtype), torch.randn(N) * torch.logspace(-4, 1, 5).repeat_interleave(BLOCK)
    grad[:BLOCK] = 0.0
    grad[2 * BLOCK + 3] = 300.0
    first, second = (
        torch.randint(0, 256, (N,), dtype=torch.uint8),
        torch.randint(100, 256, (N,), dtype=torch.uint8),
    )
    return p, grad.to(dtype), first, torch.rand(5) * 1e-2, second, torch.rand(5) * 1e-4


def wide(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    return (table.double()[codes.int()].view(-1, BLOCK) * scales.double()[:, None]).flatten()


def nearest(codes: Tensor, scales: Tensor, table: Tensor, state: Tensor) -> bool:
    """Whether each code is the entry nearest to the state in float64, up to the rounding of the state to
    float32.
    """
    scaled = state.view(-1, BLOCK) / scales.double()[:, None]
    best = (scaled[..., None] - table.double()).abs().amin(-1)
    got = (scaled - table.double()[codes.view(-1, BLOCK).int()]).abs()
    return bool((got <= best + 1e-6).all())


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_against_float64(dtype: torch.dtype, decoupled: bool) -> None:
    p, grad, first, first_scale, second, second_scale = made(dtype)
    m, v, value, slope = (
        wide(first, first_scale, SIGNED),
        wide(second, second_scale, UNSIGNED),
        p.double(),
        grad.double(),
    )
    value, slope = (value - 1e-2 * 0.1 * value, slope) if decoupled else (value, slope + 0.1 * value)
    m, v = 0.9 * m + 0.1 * slope, 0.99 * v + 0.01 * slope.square()
    wanted = value - 1e-2 * (m / (1 - 0.9**3)) / ((v / (1 - 0.99**3)).sqrt() + 1e-8)
    tiled.adam(
        p,
        grad,
        first,
        first_scale,
        second,
        second_scale,
        SIGNED,
        UNSIGNED,
        1e-2,
        0.9,
        0.99,
        0.1,
        1e-8,
        3,
        decoupled,
    )
    assert (p.double() - wanted).norm() <= LIMITS[dtype] * wanted.norm()
    for codes, scales, table, state in ((first, first_scale, SIGNED, m), (second, second_scale, UNSIGNED, v)):
        torch.testing.assert_close(
            scales.double(), state.view(-1, BLOCK).abs().amax(1).clamp(min=1e-12), rtol=1e-6, atol=0.0
        )
        assert nearest(codes, scales, table, state)


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_lion_against_float64(dtype: torch.dtype) -> None:
    p, grad, first, first_scale, *_ = made(dtype)
    m, value, slope = wide(first, first_scale, SIGNED), p.double(), grad.double()
    wanted = value - 1e-2 * 0.1 * value - 1e-2 * (0.9 * m + 0.1 * slope).sign()
    tiled.lion(p, grad, first, first_scale, SIGNED, 1e-2, 0.9, 0.99, 0.1)
    assert (p.double() - wanted).norm() <= LIMITS[dtype] * wanted.norm()
    assert nearest(first, first_scale, SIGNED, 0.99 * m + 0.01 * slope)


def test_the_operators() -> None:
    """Registered; what they do not take (fp64) goes to torch, which agrees."""
    tiled.register("cpu")
    for operator, table, numbers, count in (
        (op.adam8, (SIGNED, UNSIGNED), (1e-2, 0.9, 0.99, 0.1, 1e-8, 3, True), 6),
        (op.lion8, (SIGNED,), (1e-2, 0.9, 0.99, 0.1), 4),
    ):  # fmt: skip
        ours, theirs = made(torch.float32)[:count], made(torch.float32)[:count]
        theirs = (theirs[0].double(), theirs[1].double(), *theirs[2:])
        torch.library.opcheck(operator, (*made(torch.float32)[:count], *table, *numbers))
        operator(*ours, *table, *numbers)
        operator(*theirs, *table, *numbers)
        torch.testing.assert_close(ours[0], theirs[0].float())
        assert (ours[2] != theirs[2]).double().mean() < 0.01


@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit])
def test_torchaos_optimizer_on_the_kernel(kind: type[torch.optim.Optimizer]) -> None:
    """Three steps of it and of torchao's own, from the same state_dict on: the parameters stay together."""
    tiled.register("cpu")
    torch.manual_seed(0)
    start, gradients = torch.randn(16, 256), [torch.randn(16, 256) for _ in range(3)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine, own = (kind([p], lr=1e-2, weight_decay=0.1) for p in (ours, theirs))
    with torch.compiler.set_stance("force_eager"):
        for step, gradient in enumerate(gradients):
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            assert op.step8(mine)
            own.step()
            if step == 1:
                mine.load_state_dict(passed_on(own))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert type(mine.state[ours]["exp_avg"]) is type(own.state[theirs]["exp_avg"])
    assert mine.state[ours]["step"] == own.state[theirs]["step"]


def test_lion_in_8_bits_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of the optimizer on the kernel and of the same in torch: one path, launched once a step."""
    tiled.register("cpu")
    torch.manual_seed(0)
    start, gradients = torch.randn(16, 256), [torch.randn(16, 256) for _ in range(3)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine, own = (Lion8bit([p], lr=1e-2, weight_decay=0.1) for p in (ours, theirs))
    launched: list[int] = []
    plain = tiled.lion8_kernel.__class__.__getitem__
    monkeypatch.setattr(
        tiled.lion8_kernel.__class__,
        "__getitem__",
        lambda self, grid: (launched.append(1), plain(self, grid))[1],
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        with monkeypatch.context() as patch:
            patch.setattr(op, "FUSED", set())
            patch.setattr("effcompile.ops.lion8.FUSED", set())
            own.step()
    assert len(launched) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (mine.state[ours]["codes"] != own.state[theirs]["codes"]).double().mean() < 0.01


def passed_on(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict through a file, as from one process to another."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file)
    return found


def test_what_it_leaves_to_torchao() -> None:
    small = torch.nn.Parameter(torch.randn(64))
    small.grad = torch.randn(64)
    assert not op.step8(AdamW8bit([small], lr=1e-2))
    large = torch.nn.Parameter(torch.randn(4096))
    large.grad = torch.randn(4096)
    optimizer = AdamW8bit([large], lr=1e-2, amsgrad=True)
    assert not op.step8(optimizer)
    assert not optimizer.state
