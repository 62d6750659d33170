"""Whoever is told what is being done: what cannot be told is refused, and what it raises is said to be its
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import CaptureError, InternalError, UsageError
from effcompile.search.progress import Progress, entry


class Cancelling:
    """Ends the planning."""

    def step(self, name: str) -> AbstractContextManager[None]:
        if name == "a step":
            return nullcontext()
        raise RuntimeError("cancelled")

    def update(self, name: str, done: int, total: int) -> None:
        raise RuntimeError("cancelled")


def test_what_a_progress_raises_is_its_own() -> None:
    with pytest.raises(UsageError, match="`progress` that was given raised RuntimeError: cancelled"):
        effcompile.optimize(
            nn.Linear(4, 4).eval(), inputs=torch.randn(2, 4), progress=Cancelling(), target="cpu-generic"
        )


def test_what_it_raises_of_a_count_is_its_own_and_what_a_step_raises_is_not() -> None:
    @entry("a task")
    def task(model: nn.Module, *, counts: bool, progress: Progress) -> None:
        with progress.step("a step"):
            if counts:
                progress.update("a step", 1, 2)
            raise KeyError("foreseen by nobody")

    with pytest.raises(UsageError, match="raised RuntimeError: cancelled"):
        task(nn.Identity(), counts=True, progress=Cancelling())
    with pytest.raises(InternalError, match="failed at the stage 'a step'"):
        task(nn.Identity(), counts=False, progress=Cancelling())


class Noisy(nn.Module):
    """Draws random numbers at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("plans", [effcompile.plan, effcompile.optimize])
def test_what_is_drawn_is_as_if_nothing_were_planned(plans: Callable[..., object]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with contextlib.suppress(CaptureError):  # what answers otherwise at each call is not carried out
        plans(Noisy().eval(), inputs=torch.ones(2, 4), target="cpu-generic", backend="torch-eager")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("given", [1, "yes", None, print])
def test_what_cannot_be_told_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="give True, False, or an object"):
        effcompile.optimize(nn.Linear(4, 4).eval(), inputs=torch.randn(2, 4), progress=given)  # type: ignore[call-overload]
