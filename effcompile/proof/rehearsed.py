"""How far a plan is from the model in emulated arithmetic, at the inputs its result will be verified with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from effcompile.core.goal import Goal
from effcompile.estimate import kept
from effcompile.estimate.rehearse import Rehearsal
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.proof.alike import likely, near
from effcompile.proof.verify import Reference, alike_in, distance


def emulated(
    program: Program,
    rehearsal: Rehearsal,
    plan: Plan,
    cases: Sequence[Reference],
    goal: Goal,
) -> float | None:
    """The plan's largest error over the cases that it will be verified with, or of others like them by their
    spread (proof/alike.py); None where it is not emulated, or not finite. A plan of the same weights that was
    rehearsed before is not run again.
    """

    def run() -> float | None:
        emulate = rehearsal.of(plan)
        if emulate is None:
            return None

        def errors(of: Sequence[Reference]) -> list[float]:
            outputs = emulate([case.inputs for case in of])
            return [distance(found, program, case, goal) for found, case in zip(outputs, of, strict=True)]

        first = [case for case in cases if not case.alike]
        found = {case.name: error for case, error in zip(first, errors(first), strict=True)}
        error = max(found.values(), default=0.0)
        if near(found, goal, program):
            error = max(error, likely(errors(alike_in(cases))))
        return error if math.isfinite(error) else None

    compared = [(sorted(case.rows.items()), case.alike) for case in cases]
    chosen = (goal, compared, rehearsal.rounds(plan), [(d.site, d.option, d.form) for d in plan.decisions])
    inputs = (tensor for case in cases for tensor in case.inputs)
    return kept.rehearsed(rehearsal.known_by, inputs, chosen, run)
