"""Running a batch in micro-batches, as planned and by the model itself, to see whether their sum is the whole batch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from effcompile.backends.torch.microbatch import MicrobatchRunner
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.training import StepRunner
from effcompile.compiler.training.moved import RefutedError
from effcompile.compiler.training.work import Work
from effcompile.core.errors import UsageError, VerificationError
from effcompile.passes.training.base import Case
from effcompile.passes.training.microbatch import KIND, part_of
from effcompile.schedules.emit import Emitted


def runner_of(model: torch.nn.Module, case: Case, emitted: Emitted, ranks: Ranks | None = None) -> StepRunner:
    """What runs a plan."""
    if case.division is None:
        return StepRunner(model, case.step, emitted, scaled=case.scaled, ranks=ranks)
    return MicrobatchRunner(model, case.division, case.step, emitted, scaled=case.scaled, ranks=ranks)


def inseparable(message: str) -> RefutedError:
    """Micro-batches were run, and their sum is not the whole batch's loss or gradient."""
    return RefutedError(f"run, and not the whole batch's: {message}", kind=KIND, option="", said="no micro-batches")


def eager_in_parts(work: Work, runner: MicrobatchRunner) -> Callable[[], torch.Tensor]:
    """The model's own loss as the weighted sum of its micro-batches'."""
    divided_step = runner.divided
    batch, count = divided_step.count * divided_step.examples, divided_step.count
    weights = runner.weights(runner.parts(work.args, work.kwargs))

    def loss() -> torch.Tensor:
        total: Any = 0.0
        for index, weight in enumerate(weights):
            if weight:
                args, kwargs = part_of(work.args, work.kwargs, batch, count, index)
                total = total + weight * replace(work, args=args, kwargs=kwargs).eager_loss()
        assert isinstance(total, torch.Tensor)
        return total

    return loss


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, its modes put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    except (VerificationError, UsageError):
        raise
    except Exception as error:
        raise inseparable(f"without dropout, in evaluation mode, the model raises {type(error).__name__}: {error}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
