"""Linears and MLPs in 8 bits that hold their weights give what the operators give, whatever comes next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops import int8_codes
from effcompile.ops.int8_held import HeldLinear, HeldMlp
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_mlp import int8_linear_residual, int8_mlp
from effcompile.ops.tape import HeldOperator, Tape, TapeStep

Linear = tuple[Tensor, Tensor, Tensor | None]


def linear(n: int, k: int, seed: int, *, biased: bool = True) -> Linear:
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (n, k), generator=drawn, dtype=torch.int8)
    bias = torch.randn(n, generator=drawn) if biased else None
    return int8_codes.pack(codes), torch.rand(n, generator=drawn) / 500, bias


def called(held: HeldOperator, behind: bool = False) -> Tape:
    """It alone; `behind`: with a residual."""
    return Tape([TapeStep(held, (0, 1) if behind else (0,))], 1 + behind, [1 + behind])


def inputs(*shape: int) -> list[Tensor]:
    """Of one shape and others in turn: dense, rows apart, of another order."""
    x = torch.randn(*shape)
    apart = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    return [
        x,
        x * 2,
        apart,
        torch.randn(3, 40, shape[-1]),
        x.transpose(0, 1),
        x * 3,
        torch.randn(1, 2, shape[-1]),
    ]


@pytest.mark.parametrize(("after", "biased"), [("none", True), ("gelu", False)])
def test_a_linear(after: str, biased: bool) -> None:
    given = linear(37, 48, 0, biased=biased)
    held = called(HeldLinear(*given, after))
    for x in inputs(2, 70, 48):
        assert torch.equal(held(x)[0], int8_linear(x, *given, after))


@pytest.fixture
def threads_as_they_are() -> Iterator[None]:
    here = torch.get_num_threads()
    yield
    torch.set_num_threads(here)


@pytest.mark.usefixtures("threads_as_they_are")
@pytest.mark.parametrize("normed", [False, True])
def test_an_mlp_and_a_linear_with_what_is_behind(normed: bool) -> None:
    first, last = linear(64, 48, 0), linear(32, 64, 1)
    norm = (torch.randn(32), torch.randn(32), 1e-5) if normed else (None, None, None)
    mlp, alone = HeldMlp(first, "gelu", last, norm), HeldMlp(None, "none", first)
    with_residual, without, linear_alone = called(mlp, True), called(mlp), called(alone, True)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for x in inputs(2, 70, 48):
            residual = torch.randn(*x.shape[:-1], 32)
            for behind in (
                residual,
                residual.flip(0),
                residual.transpose(0, 1).contiguous().transpose(0, 1),
                None,
            ):
                found = without(x) if behind is None else with_residual(x, behind)
                assert torch.equal(found[0], int8_mlp(x, *first, "gelu", *last, behind, *norm))
            wide = torch.randn(*x.shape[:-1], 64)
            found = linear_alone(x, wide)
            assert torch.equal(found[0], int8_linear_residual(x, *first, wide, None, None, None))


def test_what_does_not_fit_is_told_at_any_call() -> None:
    held = called(HeldLinear(*linear(37, 48, 0)))
    mlp = called(HeldMlp(linear(64, 48, 0), "gelu", linear(32, 64, 1)))
    x = torch.randn(2, 70, 48)
    for call in (held, mlp):
        call(x)
        for wrong in (x.double(), x[..., :40].contiguous()):
            with pytest.raises(UsageError, match="in float32"):
                call(wrong)
        call(x)
