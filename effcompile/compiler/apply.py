"""A plan's decisions carried out on the program, pass by pass, each checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from effcompile.capture.verify import relative_error
from effcompile.core.errors import VerificationError
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.stages import stage, without
from effcompile.core.units import format_error
from effcompile.ir.export import run_mended
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes import Pass
from effcompile.proof.verify import Reference


def apply_passes(
    program: Program, passes: Sequence[Pass], plan: Plan, example: Reference | None = None
) -> Program:
    """Every pass in turn, the program checked after each; `example` knows how far rounding alone may move the
    result.

    Raises:
        VerificationError: an exact pass changed the result; names it and those before it.
    """
    before: list[str] = []
    reference: Any = None
    for each in passes:
        with stage(f"pass {each.name}", without(each.name)):
            edited = each.apply(program, plan)
            if edited.module is not program.module:
                edited.graph.lint()
        if (
            each.exact
            and edited.module is not program.module
            and plan.goal.reads == "all"
            and not _approximates(each, plan)
        ):
            with torch.no_grad():
                reference = (
                    program.module(*program.args, **program.kwargs) if reference is None else reference
                )
                result = run_mended(edited, edited.args, edited.kwargs)
            error = relative_error(result, reference)
            if not error <= (EXACT_TOLERANCE if example is None else example.limit(plan.goal, error)):
                done = f" after {', '.join(before)}" if before else ""
                raise VerificationError(
                    f"The pass {each.name!r}{done} must not change results but did: relative error "
                    f"{format_error(error)}. Leave it out with --pass no-{each.name}, and report it."
                )
        elif edited.module is not program.module:
            reference = None  # from here on exact is what this one left
        before.append(each.name)
        program = edited
    return program


def _approximates(each: Pass, plan: Plan) -> bool:
    """Whether this plan has a decision of the pass that makes an error by itself."""
    return any(d.by == each.name and d.cost.error_squared > 0 for d in plan.decisions)
