"""Tiny sparse models as their controllers tell of them: layers, patterns and FLOPs are real, and the clock
goes by the FLOPs done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import real_plans as real
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from effcompile import DynamicSparsity
from effcompile.core import timing
from effcompile.ir.sparsity import SparsityFigures

SPEED = 1e9
CALL = 1e-7


class Counted(TorchDispatchMode):
    """The FLOPs of what runs inside, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


@contextmanager
def working() -> Iterator[None]:
    """A machine that does SPEED FLOPs a second, whatever else it does."""
    looks = iter(range(1 << 30))
    with Counted() as counted, pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "perf_counter", lambda: counted.flops / SPEED + CALL * next(looks))
        yield


def trained(done: int = 0, **recipe: Any) -> tuple[DynamicSparsity, Any]:
    """The controller of a tiny language model, after so many steps, and the loss."""
    model = real.TinyGPT(layers=3, width=64).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsity = DynamicSparsity(model, optimizer, block=16, layers=["h.*.up", "h.*.down"], **recipe)

    def loss() -> Tensor:
        found: Tensor = model(real.ids(2, 32))
        return found

    for _ in range(done):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsity.step()
    return sparsity, loss


@cache
def measured() -> SparsityFigures:
    """In blocks, of which the kernels do no more than there are."""
    sparsity, loss = trained(7, sparsity=0.75, updates=4, steps=20, execution="blocks")
    with working():
        return sparsity.measure(loss, rounds=1)


@cache
def no_gain() -> SparsityFigures:
    """Under masks, whose products are dense ones."""
    sparsity, loss = trained(
        sparsity=0.75, updates=0, execution="masked", initial="magnitude", distribution="global"
    )
    with working():
        return sparsity.measure(loss, rounds=1)


@cache
def static() -> SparsityFigures:
    """Not measured."""
    return trained(sparsity=0.5, updates=0, execution="masked")[0].figures()


@cache
def nothing() -> SparsityFigures:
    """Its neurons were taken out: smaller dense layers are left."""
    sparsity, _ = trained(sparsity=0.5, updates=0, initial="dense", execution="masked")
    for number in range(3):
        sparsity.shrink_neurons([f"h.{number}.up"], [f"h.{number}.down"])
    return sparsity.figures()
