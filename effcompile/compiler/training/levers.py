"""Each lever alone, pairs of them, and all: the same step solved with subsets of {recompute, offload, compress}."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import combinations

from effcompile.compiler.training.prepare import Figures, Prepared, with_levers
from effcompile.compiler.training.solve import Schedule, best_schedule
from effcompile.errors import InfeasibleError
from effcompile.passes.checkpoint import Checkpoint
from effcompile.passes.levers import RECOMPUTE, Levers
from effcompile.planner.remat import BlockFront


def subsets(levers: Levers) -> tuple[tuple[str, ...], ...]:
    """Each lever alone, then pairs, up to all of them."""
    return tuple(subset for count in range(1, len(levers.names) + 1) for subset in combinations(levers.names, count))


def solve_with(
    variants: Iterable[Prepared],
    levers: Levers,
    names: Collection[str],
    checkpoint: Checkpoint,
    figures: Figures,
    budgets: Iterable[int | None],
) -> dict[int | None, Schedule | InfeasibleError]:  # fmt: skip
    """The best schedule at each budget with these levers alone, or why there is none.

    Args:
        variants: of the step, as `prepare` made them.
        levers: all that there are, with their options.
        names: which of them to use, of LEVERS.
        checkpoint: as in `prepare`; without recomputation there are no groups either.
        figures: times of operators.
        budgets: bytes of the whole step; None: no limit.

    Raises:
        UnknownNameError: a name that is no lever.
    """
    some = levers.only(names)
    alone = replace(checkpoint, groups=checkpoint.groups and RECOMPUTE in names)
    solved: dict[str, BlockFront] = {}
    prepared = [with_levers(variant, some, alone, figures, solved) for variant in variants]
    found: dict[int | None, Schedule | InfeasibleError] = {}
    for budget in budgets:
        try:
            found[budget] = best_schedule(prepared, alone, budget)[0]
        except InfeasibleError as error:
            found[budget] = error
    return found
