"""Running a batch in micro-batches, as planned and by the model itself, to see whether their sum is the whole
batch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.backends.torch.microbatch import MicrobatchRunner
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.training import StepRunner
from effcompile.core.errors import UsageError, VerificationError
from effcompile.core.torch_compat_aot import is_random
from effcompile.core.types import Kwargs
from effcompile.machine.room import NoRoomError
from effcompile.passes.training.base import Case
from effcompile.passes.training.microbatch import KIND, part_of
from effcompile.schedules.emit import Emitted
from effcompile.search.training.moved import RefutedError
from effcompile.search.training.work import Work

aten = torch.ops.aten


def runner_of(model: torch.nn.Module, case: Case, emitted: Emitted, ranks: Ranks | None = None) -> StepRunner:
    """What runs a plan."""
    if case.division is None:
        return StepRunner(model, case.step, emitted, scaled=case.scaled, ranks=ranks)
    return MicrobatchRunner(model, case.division, case.step, emitted, scaled=case.scaled, ranks=ranks)


def inseparable(message: str) -> RefutedError:
    """Micro-batches were run, and their sum is not the whole batch's loss or gradient."""
    return RefutedError(
        f"run, and not the whole batch's: {message}", kind=KIND, option="", said="no micro-batches"
    )


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


#: What fills a draw of numbers: within the range of every usual distribution.
_FILL = 0.4


class Undrawn(TorchDispatchMode):
    """Within, nothing is left to chance: dropout keeps everything, and what is drawn otherwise is one number
    at every place.

    So the whole batch and its micro-batches can be compared, which draw other numbers. It acts on operators,
    not on modules: dropout as a function, inside an attention or in evaluation mode is dropout, too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        if "dropout_p" in given:  # attention, and its backward
            return func(**given | {"dropout_p": 0.0})
        result = func(*args, **(kwargs or {}))
        if not is_random(func):
            return result
        if func is torch.ops.effcompile.dropped.default:
            return torch.div(given["x"], 1 - given["p"])
        if func is aten.native_dropout.default:
            return torch.div(given["input"], 1 - given["p"]), torch.ones_like(result[1])
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                leaf.fill_(_kept(func, leaf, given))
        return result


def _kept(func: Any, drawn: torch.Tensor, given: Kwargs) -> float:
    """What a draw is replaced by: what is kept by chance is kept; of whole numbers the least."""
    if "bernoulli" in func.name() or drawn.dtype == torch.bool:
        return 1
    return _FILL if drawn.is_floating_point() else given.get("low", given.get("from", 0))


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Nothing is drawn within; a model that does not run so cannot be compared."""
    try:
        with Undrawn():
            yield
    except (VerificationError, UsageError, NoRoomError):
        raise
    except Exception as error:
        raise inseparable(f"with nothing drawn, the model raises {type(error).__name__}: {error}") from error
