"""Integers that a graph makes of its inputs and that a runtime would round: which are looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.backends.indices import bounded_inputs, flagged
from effcompile.backends.large_integers import too_large
from effcompile.backends.openvino.backend import OpenVino
from effcompile.capture import capture
from effcompile.core.errors import LoweringError
from effcompile.ir.program import Program

LIMIT = 1 << 24
Make = Callable[[Tensor, Tensor], Tensor]
#: What may grow, and what is made of it so that the answer does not tell.
GROW: dict[str, Make] = {
    "product": lambda a, b: a * b,
    "product with a constant": lambda a, b: a * -50021 % 1009,
    "sum": lambda a, b: a + b,
    "sum with a factor": lambda a, b: torch.add(a, b, alpha=-3),
    "difference": lambda a, b: a - b,
    "difference from a constant": lambda a, b: 7 - a,
    "square": lambda a, b: a**2,
    "sum of a row": lambda a, b: a.sum(1),
    "sums along a row": lambda a, b: a.cumsum(1) % 10,
    "product of a row": lambda a, b: a.prod(1),
    "product of matrices": lambda a, b: a @ b.T,
}


class Makes(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.linear = make, nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return self.linear(x) + self.make(a, b).sum() % 10


def _largest(make: Make, a: Tensor, b: Tensor) -> float:
    """Of what an operator makes, in floating point, and never below the integer."""
    wide = [t.double().abs() for t in (a, b)]
    by_name = {name: value for name, value in GROW.items() if value is make}
    (name,) = by_name
    found = {
        "product with a constant": lambda: wide[0] * 50021,
        "sum with a factor": lambda: wide[0] + 3 * wide[1],
        "difference": lambda: wide[0] + wide[1],
        "difference from a constant": lambda: wide[0] + 7,
        "sums along a row": lambda: wide[0].cumsum(1),
    }.get(name, lambda: make(*wide))()
    return float(found.max())


@pytest.mark.parametrize("name", list(GROW))
def test_a_flag_says_whether_an_integer_is_beyond(name: str) -> None:
    make = GROW[name]
    program = capture(Makes(make), (torch.ones(2, 3, dtype=torch.long),) * 2 + (torch.randn(2, 3),))
    found = flagged(program, LIMIT)
    generator, refused = torch.Generator().manual_seed(0), 0
    for power in (*range(1, 24), *[24] * 9):
        a, b = (torch.randint(-(2**power), 2**power, (2, 3), generator=generator) for _ in range(2))
        *_, fine = found.module(a, b, torch.randn(2, 3))
        # what is made of it is looked at, too: the sum of all
        assert not (bool(fine) and _largest(make, a, b) >= LIMIT), (power, a, b)
        if power < 3:
            assert bool(fine)
        refused += not bool(fine)
    assert refused


NOT_LARGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of flags": lambda a, b: (a > 0).sum(1) * 3 + (a > 0).long().cumsum(1)[:, 0],
    "a remainder's": lambda a, b: a % 1000 * 7,
    "clamped": lambda a, b: a.clamp(0, 100) * 50,
    "of sizes": lambda a, b: torch.arange(a.shape[1]) * 40,
    "chosen": lambda a, b: torch.where(a > b, a, b).amax(1),
    "in floating point": lambda a, b: a.float() * b,
}


@pytest.mark.parametrize("name", list(NOT_LARGE))
def test_what_cannot_be_large_is_not_looked_at(name: str) -> None:
    class Small(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return NOT_LARGE[name](a, b).float()

    program = capture(Small(), (torch.ones(2, 3, dtype=torch.long),) * 2)
    assert _found(program) == []
    assert flagged(program, LIMIT).outputs == program.outputs


def _found(program: Program) -> list[object]:
    return [node.target for node in too_large(program, bounded_inputs(program), LIMIT)]


def test_ids_of_a_table_are_no_larger_than_it() -> None:
    class Hashed(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.ids, self.table = nn.Embedding(rows, 4), nn.Embedding(101, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.ids(ids) + self.table((ids + 1) * 43 % 101)

    ids = torch.tensor([[1, 2]])
    assert _found(capture(Hashed(1000), (ids,))) == []
    assert _found(capture(Hashed(1 << 20), (ids,))) == [torch.ops.aten.mul.Tensor]


@pytest.mark.skipif(OpenVino().unavailable() is not None, reason="openvino or nncf is not installed")
def test_openvino_refuses_what_it_would_round() -> None:

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1009, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table((ids + 1) * 43 % 1009) * 2

    model, ids = Hashed().eval(), torch.randint(0, 100, (2, 6))
    fast = effcompile.optimize(model, inputs=ids, backend="openvino")
    assert torch.equal(fast(ids + 200_000), model(ids + 200_000))
    with pytest.raises(LoweringError, match=r"2\^24 or beyond, which some of OpenVINO's operators round"):
        fast(ids + 1_000_003)
