"""What each memory lever reaches alone, in pairs, and with all others: the same step solved with subsets of them.

A lever is a way to need less memory that the planner may take or leave. Some are forms of blocks (recompute, offload,
compress: passes/training/levers.py); the others are whole choices (cases.py). A subset is the same search over the cases
that have no other lever, their blocks' options found with those block forms alone. A subset's search is not
given the patience of the whole: what is shown of it can be reached, and a longer search may reach a little more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.training.cases import Joint, StepCase, cases, recorded
from effcompile.compiler.training.microbatch import Divisions
from effcompile.compiler.training.prepare import Figures, Preparation, Prepared, with_levers
from effcompile.compiler.training.states import Parts
from effcompile.core.errors import InfeasibleError, UnknownNameError
from effcompile.core.units import format_seconds
from effcompile.ir.footprint import excess
from effcompile.ir.plan import LeverRow
from effcompile.passes.training.checkpoint import Checkpoint, carried_out, periodic
from effcompile.passes.training.levers import LEVERS, RECOMPUTE, Levers
from effcompile.passes.training.states import StatesOption
from effcompile.planner.remat import BlockFront

#: No lever of ours: whole blocks are remade at a fixed period, as other libraries do.
PERIODIC = "periodic"
_EVERY = (8, 6, 4, 3, 2, 1)
#: Pairs of levers are looked at for so long at the most.
PAIRS_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """A step, its levers, and what subsets of them reach.

    Attributes:
        found: the step's variants. ways: to hold the optimizer's states, the given one first.
        levers: of its blocks. checkpoint, figures: as the step was prepared with.
        divided: the variants of micro-batches, by their number.
        known: block levers and number of micro-batches → variants with these; filled as subsets are asked for.
    """

    found: Preparation
    ways: Sequence[StatesOption]
    levers: Levers
    checkpoint: Checkpoint
    figures: Figures
    divided: Mapping[int, tuple[Preparation, Parts]] = field(default_factory=dict)
    known: MutableMapping[tuple[tuple[str, ...], int], list[Prepared]] = field(default_factory=dict)

    @classmethod
    def of(cls, divisions: Divisions, found: Preparation) -> Subsets:
        """Those of one request, with the micro-batches that were prepared so far."""
        work = divisions.work
        ways, _ = work.ways(found.captured)
        return cls(
            found=found, ways=ways, levers=work.passes.levers, checkpoint=work.passes.checkpoint, figures=work.figures,
            divided=divisions.made,
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        """The levers that can be taken or left: what every case has is none."""
        every = list(self.every(self.levers.names))
        used = [case.levers for case in every]
        kinds = dict.fromkeys(kind for case in every for kind in case.options)
        whole = (kind for kind in kinds if 0 < sum(kind in levers for levers in used) < len(used))
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
        record.search(case for case in self.every(names) if not others & case.levers)
        return replace(record.best, record=record, bound=record.bound)

    def every(self, names: Collection[str]) -> Iterator[StepCase]:
        """The cases whose blocks have these levers alone."""
        for count, (found, parts) in {1: (self.found, None), **self.divided}.items():
            variants = replace(found, variants=self._variants(names, found, count))
            batch = parts.step.count * parts.step.examples if parts else 1
            yield from cases(variants, self.ways, self._checkpoint(names), parts, batch)

    def reach(self, names: Collection[str], budget: int) -> LeverRow:
        """The same as a row."""
        try:
            joint = self.solve(names, budget)
        except InfeasibleError as error:
            return LeverRow(levers=tuple(names), seconds=None, peak_bytes=error.needed)
        return LeverRow(levers=tuple(names), seconds=joint.seconds, peak_bytes=joint.peak_bytes)

    def _variants(self, names: Collection[str], found: Preparation, count: int) -> list[Prepared]:
        blocks = tuple(name for name in LEVERS if name in names)
        if (blocks, count) not in self.known:
            some, checkpoint = self.levers.only(blocks), replace(self._checkpoint(blocks), patience=1)
            solved: dict[str, BlockFront] = {}
            same = some == self.levers
            self.known[blocks, count] = found.variants if same else [
                with_levers(p, some, checkpoint, self.figures, solved) for p in found.variants
            ]  # fmt: skip
        return self.known[blocks, count]

    def _checkpoint(self, names: Collection[str]) -> Checkpoint:
        """Without recomputation there are no groups either."""
        return replace(self.checkpoint, groups=self.checkpoint.groups and RECOMPUTE in names)


def lever_rows(
    subsets: Subsets, joint: Joint, budget: int, progress: Progress = QUIET, *, seconds: float = PAIRS_SECONDS
) -> tuple[tuple[LeverRow, ...], list[str]]:
    """None of the levers, what checkpointing by a fixed period reaches, each alone, the best pair, and all (the plan).

    Nothing where there are not two to choose from.

    Pairs of levers that need the least alone come first; after `seconds` no more are looked at, and the note says so.
    """
    names = subsets.names
    if len(names) < 2:
        return (), []
    none, *alone = _reached(subsets, [(), *((name,) for name in names)], budget, progress)
    order = {row.levers[0]: rank for rank, row in enumerate(sorted(alone, key=_rank))}
    ordered = sorted(combinations(names, 2), key=lambda pair: sorted((order[name] for name in pair), reverse=True))
    pairs = _reached(subsets, ordered if len(names) > 2 else [], budget, progress, deadline=time.monotonic() + seconds)
    cut = 0 < len(pairs) < len(ordered)
    said = f"the pair of levers is the best of {len(pairs)} of {len(ordered)}, which were looked at within {format_seconds(seconds)}"
    whole = LeverRow(levers=names, seconds=joint.seconds, peak_bytes=joint.peak_bytes)
    return (none, *_periodic(subsets, budget), *alone, *([min(pairs, key=_rank)] if pairs else []), whole), [said] * cut


def _periodic(subsets: Subsets, budget: int) -> list[LeverRow]:
    """Every k-th block remade as a whole, for the largest k that fits; for that which needs the least where none does."""
    case = next((case for case in subsets.every(()) if not case.levers), None)
    rows: list[LeverRow] = []
    if case is None:
        return rows
    for every in _EVERY:
        cut = case.prepared.plain
        chosen = periodic(cut, every)
        if chosen is None:
            continue
        peak = (carried_out(cut, chosen, ())[1].footprint + case.beside).peak_bytes
        seconds = case.seconds(case.prepared.seconds + sum(option.seconds for option in chosen))
        rows.append(LeverRow(levers=(PERIODIC,), seconds=None if excess(peak, budget) else seconds, peak_bytes=peak, every=every))
    return sorted(rows, key=_rank)[:1]


def _reached(
    subsets: Subsets, which: Sequence[tuple[str, ...]], budget: int, progress: Progress, deadline: float = math.inf
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
