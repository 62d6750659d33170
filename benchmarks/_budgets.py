"""One step at many budgets: planned, built, run; the allocator's peak and the gradients against the unplanned
graph's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.core.goal import Goal
from effcompile.machine.machines import load_target
from effcompile.passes import load_training_passes
from effcompile.passes.training.base import Case
from effcompile.passes.training.forms import forms
from effcompile.proof.training import verify
from effcompile.schedules.emit import emit
from effcompile.search.training.cases import fastest
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import Prepared, prepare
from effcompile.search.training.solve import leanest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One budget: bytes asked, predicted and real; predicted seconds; whether equal to the unplanned graph
    bit by bit.
    """

    budget: int
    predicted: int
    real: int
    seconds: float
    exact: bool
    eager_error: float
    recomputed: int
    variant: str


def sweep(model: Any, batch: dict[str, Any], count: int) -> Iterator[Outcome]:
    """Budgets from the smallest feasible to the unconstrained peak, evenly; operators are measured here, as
    in a user's run.
    """
    passes, step = load_training_passes(None), capture_training(model, (), batch)
    checkpoint = passes.checkpoint
    figures = OperatorCosts(target=load_target("cpu-generic"), here=True)
    made = forms(passes.step, Case(step=step), figures.context(Goal(mode="training")))
    found = prepare(step, made.cases, checkpoint, figures)
    low = min(leanest(prepared) for prepared in found.variants)
    high = fastest(found, None).trace.peak_bytes
    eager = verify.run(lambda: model(**batch).loss, model)
    unplanned: dict[int, verify.Result] = {}
    for k in range(count):
        budget = low + round((high - low) * k / max(1, count - 1))
        best = fastest(found, budget)
        runner = StepRunner(model, best.prepared.step, best.emitted)
        ran = verify.run(lambda: runner.loss((), batch), model)  # noqa: B023
        reference = unplanned.setdefault(id(best.prepared), _unplanned(model, batch, best.prepared))
        yield Outcome(
            budget=budget,
            predicted=best.trace.peak_bytes,
            real=best.prepared.cut.given_bytes + (ran.peak_bytes or 0),
            seconds=best.seconds,
            exact=_equal(ran, reference),
            eager_error=verify.compare(ran, eager, None).error,
            recomputed=best.emitted.recomputed,
            variant=best.prepared.case.label,
        )


def _unplanned(model: Any, batch: dict[str, Any], prepared: Prepared) -> verify.Result:
    """The same graph with everything kept."""
    runner = StepRunner(model, prepared.step, emit(prepared.cut, prepared.cut.decidable))
    return verify.run(lambda: runner.loss((), batch), model)


def _equal(a: verify.Result, b: verify.Result) -> bool:
    same = all(
        (g is None and b.gradients[n] is None) or torch.equal(g, b.gradients[n])
        for n, g in a.gradients.items()
    )
    return bool(torch.equal(a.loss, b.loss) and same)
