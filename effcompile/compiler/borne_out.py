"""Whether the measured time bears the predicted one out.

Where it does not, the prices were another minute's: they are taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from effcompile.compiler.settle import Outcome
from effcompile.core.reasons import Because, Reason
from effcompile.ir.figures import Candidate
from effcompile.ir.plan import Plan
from effcompile.machine.load import busy
from effcompile.search.machine import Machine

#: A backend predicted this much slower than it is measured has kernel times that do not hold.
_FAR_OFF = 1.6
_TIMES = "predicted {seconds}, measured {seconds}"


def confirmed(
    measured: Callable[[], Outcome], solved_again: Callable[[], Outcome], rebuilt: Callable[[Plan], Outcome]
) -> Outcome:
    """The outcome, or where its times are far apart a better one, and notes that say what was done.

    First the chosen plan and the runners-up are timed once more, in turn: the measurement may have been the
    busy minute. If that does not bear the prediction out, kernels are timed and the plan is solved anew, and
    the faster of the two is taken, each in units of the original that was timed beside it; the same plan is
    taken with its new prices. While the machine is busy it is only said.

    Args:
        measured: times the original and all that was built in turn, and chooses.
        solved_again: forgets the kernels' times, takes them again, solves, builds and measures. What was
            built and is not chosen again is let go of first: a second lowered model beside it is more than
            planning may take.
        rebuilt: a measured plan, built once more.
    """
    best = measured()
    if best.plan.misjudged is None:
        return best
    first = _times(best.plan)
    best = measured()
    if best.plan.misjudged is None:
        return _noted(
            best,
            Because(
                "measured again: " + _TIMES + " did not hold; " + _TIMES + " does",
                (*first, *_times(best.plan)),
            ),
        )
    if others := busy():  # of such a minute prices are as good as those that there are
        return _noted(
            best,
            Because(_TIMES + " do not agree, and the machine is busy: {name}", (*_times(best.plan), others)),
        )
    before = best.plan
    del best  # what it was lowered to is not held while another is built
    taken, then, other = solved_again(), "taken", before
    if not before.same_choices(taken.plan) and _share(before) < _share(taken.plan):
        other, then = taken.plan, "the first plan is faster, and stays"
        del taken
        taken = rebuilt(before)
    text = _TIMES + " did not agree: kernels were timed and the plan solved again ({name}: " + _TIMES + ")"
    return _noted(taken, Because(text, (*first, then, *_times(taken.plan))), *other.notes)


def _times(plan: Plan) -> tuple[float, float]:
    """What `_TIMES` has holes for."""
    measured = plan.measured.seconds if plan.measured is not None else None
    return plan.predicted.seconds or 0.0, measured or 0.0


def _share(plan: Plan) -> float:
    """Measured seconds over the original's, timed in turn with it."""
    ours = plan.measured.seconds if plan.measured is not None else None
    theirs = plan.measured_baseline.seconds if plan.measured_baseline is not None else None
    return float("inf") if ours is None or not theirs else ours / theirs


def _noted(outcome: Outcome, *notes: Reason) -> Outcome:
    return replace(
        outcome, plan=replace(outcome.plan, notes=tuple(dict.fromkeys((*outcome.plan.notes, *notes))))
    )


def stale_timings(machine: Machine, candidates: Sequence[Candidate]) -> list[Reason]:
    """Forget the kernel times of backends whose whole-model prediction is far off: they were taken on a busy
    machine.

    A sum of kernels that is too small by as much is not the kernels' fault alone, so only one that is too
    large counts.
    """
    notes: list[Reason] = []
    for candidate in candidates:
        predicted, measured = candidate.predicted_seconds, candidate.measured_seconds
        if predicted and measured and predicted > _FAR_OFF * measured and machine.distrust(candidate.backend):
            text = (
                "{name}: " + _TIMES + ": its kernels' times look stale, and are taken anew by the next plan"
            )
            notes.append(Because(text, (candidate.backend, predicted, measured)))
    return notes
