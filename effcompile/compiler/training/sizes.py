"""The batch by what its steps take on this machine: the size that was foreseen to be best, run beside those
next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from effcompile.compiler.training.attempt import Attempt, Ran
from effcompile.core.errors import InfeasibleError
from effcompile.core.timing import faster_half_median
from effcompile.ir.plan import Plan
from effcompile.planner.batch import BatchTrial
from effcompile.proof.training import verify
from effcompile.proof.training.in_parts import runner_of
from effcompile.search.training.batch import Planned, Sized
from effcompile.search.training.cases import Joint
from effcompile.search.training.work import Work

Built = tuple[Attempt, Ran]
#: Another size is taken only where its steps, run in turn, have shown more than this to be gained.
_WORTH = 0.02
#: Sizes whose foreseen rates are further below the best are not run: twice as far where times are that far
#: from what was foreseen.
_LEAST_BAND, _MOST_BAND = 1.25, 2.0
_ROUNDS, _FEWEST, _SECONDS = 9, 3, 30.0
#: Seconds of a step beyond which no other size is run.
_LONG = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestSize:
    """The size that is best when it is run.

    `rates`: size → examples a second, of those that were run in turn; none where none was.
    """

    chosen: Sized
    built: Built
    rates: Mapping[int, float]


def best_measured(chosen: Sized, build: Callable[[Planned], Built]) -> FastestSize:
    """The chosen size built, and sizes next to it run beside it, uphill as long as one is faster; the fastest
    is built.

    What a size takes is foreseen from operators timed one by one, which is off where caches or other work
    disturb some of them. All sizes of one comparison are run in turn, so that a slow minute falls on all
    alike. Where the fastest, once it is verified, does not fit after all, the size that was built first
    stays.

    Args:
        chosen: by prediction.
        build: solves, builds and verifies a size.
    """
    built = build(chosen.planned)
    plan = built[1].made.executable.plan
    if plan.measured is None or (plan.measured.seconds or 0.0) > _LONG:
        return FastestSize(chosen=chosen, built=built, rates={})
    band, best, rates = _band(plan), chosen.best, dict[int, float]()
    runs = {best.batch: (built[0].work, built[1].joint)}
    while near := _worth_running(chosen, best, band, runs):
        runs |= {trial.batch: (trial.made.work, trial.made.joint) for trial in near if trial.made is not None}
        rates = _rates(runs)
        fastest = max(rates, key=rates.__getitem__)
        if rates[fastest] <= rates[best.batch] * (1 + _WORTH):
            break
        best = chosen.search.tried[fastest]
    if best is not chosen.best and best.made is not None:
        with suppress(InfeasibleError):
            return FastestSize(chosen=replace(chosen, best=best), built=build(best.made), rates=rates)
    return FastestSize(chosen=chosen, built=built, rates=rates if best is chosen.best else {})


def _band(plan: Plan) -> float:
    """How far below the best a foreseen rate may lie for its size to be run."""
    assert plan.measured is not None
    measured, foreseen = plan.measured.seconds, plan.predicted.seconds
    off = max(measured / foreseen, foreseen / measured) if measured and foreseen else 1.0
    return min(max(off, _LEAST_BAND), _MOST_BAND)


def _worth_running(
    chosen: Sized, best: BatchTrial[Planned], band: float, run: Mapping[int, tuple[Work, Joint]]
) -> list[BatchTrial[Planned]]:
    beside = [trial for trial in chosen.search.beside(best.batch) if trial.batch not in run]
    return [trial for trial in beside if trial.rate * band >= best.rate]


def _rates(runs: Mapping[int, tuple[Work, Joint]]) -> dict[int, float]:
    """Size → examples a second of steps run in turn, their updates as they are priced."""
    steps = {size: _step(work, joint) for size, (work, joint) in runs.items()}
    samples: dict[int, list[float]] = {size: [] for size in runs}
    work = next(iter(runs.values()))[0]
    start, rounds = perf_counter(), 0
    with work.progress.step(f"run batches of {', '.join(map(str, sorted(runs)))} in turn"):
        while rounds < _FEWEST or (rounds < _ROUNDS and perf_counter() - start < _SECONDS):
            for size, step in steps.items():
                samples[size].append(step())
            rounds += 1
    return {
        size: size / (faster_half_median(samples[size]) + _update(joint)) for size, (_, joint) in runs.items()
    }


def _step(work: Work, joint: Joint) -> Callable[[], float]:
    """Runs a schedule once, forward and backward, and says the seconds; gradients go nowhere."""
    runner = runner_of(work.model, joint.case, joint.schedule.emitted)
    runner.sink, runner.guarded = lambda name, gradient: None, False
    return partial(verify.seconds, partial(runner.loss, work.args, work.kwargs), work.model, work.leaves)


def _update(joint: Joint) -> float:
    return joint.case.states.seconds if joint.case.states is not None else 0.0
