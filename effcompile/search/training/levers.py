"""What each memory lever reaches alone, in pairs, and with all others: the same step solved with subsets of
them.

A lever is a way to need less memory that the planner may take or leave. Some are forms of blocks (recompute,
offload, compress: passes/training/levers.py); the others are whole choices (cases.py). A subset is the same
search over the cases that have no other lever, their blocks' options found with those block forms alone. A
subset's search is not given the patience of the whole: what is shown of it can be reached, and a longer
search may reach a little more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from effcompile.core import effort
from effcompile.core.errors import InfeasibleError, UnknownNameError
from effcompile.core.reasons import Because, Reason
from effcompile.ir.footprint import excess
from effcompile.ir.step_figures import LeverRow
from effcompile.passes.training.checkpoint import carried_out, periodic
from effcompile.passes.training.levers import RECOMPUTE, Levers
from effcompile.search.progress import QUIET, Progress
from effcompile.search.training.cases import Joint, recorded
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import Preparation, Prepared, with_levers

#: No lever of ours: whole blocks are remade at a fixed period, as other libraries do.
PERIODIC = "periodic"
_EVERY = (8, 6, 4, 3, 2, 1)
#: Pairs of levers are looked at for so long at the most.
PAIRS_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """A step, its levers, and what subsets of them reach.

    Attributes:
        found: the step's variants, of each branch that was taken up.
        levers: of its blocks. figures: as the step was prepared with.
        known: block levers and cut step → a variant of it with these; filled as subsets are asked for.
    """

    found: Sequence[Preparation]
    levers: Levers
    figures: OperatorCosts
    known: MutableMapping[tuple[tuple[str, ...], int], Prepared] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The levers that can be taken or left: what every case has is none."""
        every = [variant for found in self.found for variant in found.variants]
        kinds = dict.fromkeys(kind for variant in every for kind in variant.options)
        whole = (
            kind for kind in kinds if 0 < sum(kind in variant.case.levers for variant in every) < len(every)
        )
        return (*self.levers.names, *whole)

    def solve(self, names: Collection[str], budget: int | None) -> Joint:
        """The fastest step with these levers alone.

        Raises:
            InfeasibleError: nothing fits. UnknownNameError: a name that is no lever here.
        """
        known = self.names
        for name in names:
            if name not in known:
                raise UnknownNameError("lever", name, known)
        others = set(known) - set(names)
        record = recorded(budget, QUIET)
        record.search(prepared for prepared in self.every(names) if not others & prepared.case.levers)
        return replace(record.best, record=record, bound=record.bound)

    def every(self, names: Collection[str]) -> Iterator[Prepared]:
        """The cases whose blocks have these levers alone."""
        blocks = tuple(name for name in self.levers.names if name in names)
        yield from (self._with(blocks, variant) for found in self.found for variant in found.variants)

    def reach(self, names: Collection[str], budget: int) -> LeverRow:
        """The same as a row."""
        try:
            joint = self.solve(names, budget)
        except InfeasibleError as error:
            return LeverRow(levers=tuple(names), seconds=None, peak_bytes=error.needed)
        return LeverRow(levers=tuple(names), seconds=joint.seconds, peak_bytes=joint.peak_bytes)

    def _with(self, blocks: tuple[str, ...], variant: Prepared) -> Prepared:
        """A variant whose blocks have these levers; without recomputation there are no groups either."""
        some, checkpoint = self.levers.only(blocks), variant.checkpoint
        if some == self.levers:
            return variant
        key = blocks, id(variant.plain)
        if key not in self.known:
            fewer = replace(checkpoint, patience=1, groups=checkpoint.groups and RECOMPUTE in blocks)
            self.known[key] = with_levers(variant, some, fewer, self.figures)
        return replace(self.known[key], case=variant.case)


def lever_rows(
    subsets: Subsets, joint: Joint, budget: int, progress: Progress = QUIET, *, seconds: float = PAIRS_SECONDS
) -> tuple[tuple[LeverRow, ...], list[Reason]]:
    """None of the levers, what checkpointing by a fixed period reaches, each alone, the best pair, and all
    (the plan).

    Nothing where there are not two to choose from.

    Pairs of levers that need the least alone come first; after `seconds` no more are looked at, and the note
    says so.
    """
    names = subsets.names
    if len(names) < 2:
        return (), []
    none, *alone = _reached(subsets, [(), *((name,) for name in names)], budget, progress)
    order = {row.levers[0]: rank for rank, row in enumerate(sorted(alone, key=_rank))}
    ordered = sorted(
        combinations(names, 2), key=lambda pair: sorted((order[name] for name in pair), reverse=True)
    )
    seconds = effort.allowed(seconds)
    pairs = _reached(
        subsets, ordered if len(names) > 2 else [], budget, progress, deadline=time.monotonic() + seconds
    )
    cut = 0 < len(pairs) < len(ordered)
    text = "the pair of levers is the best of {} of {}, which were looked at within {seconds}"
    said = Because(text, (len(pairs), len(ordered), seconds))
    whole = LeverRow(levers=names, seconds=joint.seconds, peak_bytes=joint.peak_bytes)
    return (none, *_periodic(subsets, budget), *alone, *([min(pairs, key=_rank)] if pairs else []), whole), [
        said
    ] * cut


def _periodic(subsets: Subsets, budget: int) -> list[LeverRow]:
    """Every k-th block remade as a whole, for the largest k that fits; for that which needs the least where
    none does.
    """
    prepared = next((prepared for prepared in subsets.every(()) if not prepared.case.levers), None)
    rows: list[LeverRow] = []
    if prepared is None:
        return rows
    case, cut = prepared.case, prepared.plain
    for every in _EVERY:
        chosen = periodic(cut, every)
        if chosen is None:
            continue
        peak = (carried_out(cut, chosen, ())[1].footprint + case.beside).peak_bytes
        seconds = case.seconds(prepared.seconds + sum(option.seconds for option in chosen))
        rows.append(
            LeverRow(
                levers=(PERIODIC,),
                seconds=None if excess(peak, budget) else seconds,
                peak_bytes=peak,
                every=every,
            )
        )
    return sorted(rows, key=_rank)[:1]


def _reached(
    subsets: Subsets,
    which: Sequence[tuple[str, ...]],
    budget: int,
    progress: Progress,
    deadline: float = math.inf,
) -> list[LeverRow]:
    rows: list[LeverRow] = []
    for number, names in enumerate(which):
        if rows and time.monotonic() > deadline:
            break
        progress.update("hold the levers against each other", number, len(which))
        rows.append(subsets.reach(names, budget))
    return rows


def _rank(row: LeverRow) -> tuple[bool, float]:
    """Fitting before not fitting, then faster, or nearer to the budget, first."""
    return (row.seconds is None, row.peak_bytes if row.seconds is None else row.seconds)
