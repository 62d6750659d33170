"""How long a planned step takes, beside the model's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter

import torch

from effcompile.backends.torch.training import StepRunner
from effcompile.core.timing import SETTLED
from effcompile.ir.plan import FAR_APART
from effcompile.proof.training import updates, verify
from effcompile.search.training.work import Work

#: Seconds that timing a step beside the original may take, once both have run.
_TIMING_SECONDS = 20.0
#: Seconds of a long step, the share that its figure may move, and by which one that was foretold may be off.
LONG, _SETTLED_IF_LONG, _AS_FORETOLD = 2.0, 0.1, 0.15


def _repeated(samples: list[float]) -> bool:
    """Whether the two fastest are one, but for what a figure may move; that of a long step, of which each is
    seconds of a shared machine, may move more.
    """
    fastest = sorted(samples)[:2]
    if len(fastest) < 2:
        return False
    return fastest[1] <= fastest[0] * (1 + (_SETTLED_IF_LONG if fastest[0] > LONG else SETTLED))


def _foretold(samples: list[float], said: Collection[float | None]) -> bool:
    """Whether the fastest is long, and one of what was said: each of its operators was timed, or the same
    step before.
    """
    fastest = min(samples)
    return fastest > LONG and any(abs(fastest - (each or 0.0)) <= _AS_FORETOLD * fastest for each in said)


def _believed(samples: list[float], said: Collection[float | None]) -> bool:
    """Whether the fastest is long, and no faster than was said, by less than predicted times may be off.

    Where no original is timed beside it, that alone hangs on it, and a further run, which counts where it is
    faster, would bring it nearer to what was said.
    """
    fastest = min(samples)
    return fastest > LONG and any(each <= fastest <= FAR_APART * each for each in said if each)


def timed(
    work: Work,
    runner: StepRunner,
    step: Callable[[], torch.Tensor],
    found: verify.Result,
    ours: updates.Steps | None,
    *,
    together: verify.Result | None,
    foretold: tuple[Collection[float | None], Collection[float | None]] = ((), ()),
) -> tuple[float, float]:
    """Seconds of the planned and (`together`, as it was run before) of the original step, run in turn: the
    fastest of each, until it has come twice.

    A step that is long is not run once more where its time is known from whole steps; that of seconds was
    timed once while it was watched, which adds milliseconds, and is not run again where that is what was
    `foretold` (of both), or alone, is believed (`_believed`).
    """
    samples: dict[str, list[float]] = {"ours": [], "eager": []}
    rounds = 1 if found.seconds > _TIMING_SECONDS else 10
    if ours is not None and found.seconds > _TIMING_SECONDS > 0:
        samples["ours"].append(ours.step_seconds)
    elif found.seconds > LONG:
        samples["ours"].append(found.seconds)
        samples["eager"] += [together.seconds] if together is not None else []
    runs = {"ours": step, "eager": work.eager_loss} if together is not None else {"ours": step}
    runner.sink = lambda name, gradient: None
    start = perf_counter()
    alone = together is None
    while not all(samples[name] for name in runs) or (
        perf_counter() - start < _TIMING_SECONDS
        and len(samples["ours"]) < rounds
        and not all(
            _repeated(samples[name])
            or _foretold(samples[name], said)
            or (alone and _believed(samples[name], said))
            for name, said in zip(runs, foretold, strict=False)
        )
    ):
        for name, run in runs.items():
            samples[name].append(verify.seconds(run, work.model, work.leaves))
    return min(samples["ours"]), min(samples["eager"], default=0.0)
