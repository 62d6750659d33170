"""What a plan says of its blocks: what each keeps, makes again and holds elsewhere, what was not taken, how
sure the fronts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from effcompile.core.cost import Cost, Provenance
from effcompile.core.reasons import Because, Frees, Kept, OverBudget, Reason, WithinGap
from effcompile.core.units import format_bytes
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Decision, Declined
from effcompile.passes.training.checkpoint import Checkpoint, carried_out
from effcompile.planner.remat import BlockFront, BlockOption, Group
from effcompile.schedules.blocks import Blocks

KEEP = "keep everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBlocks:
    """A schedule: of each block of `cut` the option that was `chosen`, with the blocks that are remade
    together.

    options: kind of block → those to choose from. budget: of the schedule; None for none.
    """

    cut: Blocks
    options: Mapping[str, tuple[BlockOption, ...]]
    chosen: tuple[BlockOption, ...]
    groups: tuple[Group, ...]
    budget: int | None

    def decisions(self, provenance: Provenance) -> Iterator[Decision]:
        """One per block, then those of values."""
        grouped = {i: group for group in self.groups for i in range(group.first, group.last + 1)}
        for i, (block, option) in enumerate(zip(self.cut.blocks, self.chosen, strict=True)):
            full, group = self.options[block.stage.kind][0], grouped.get(i)
            origin = "" if group is None or i == group.first else self.cut.blocks[group.first].name
            yield Decision(
                site=block.name, kind=Checkpoint.name,
                option=option.label + (f"; input remade from block {origin}" if origin else ""),
                baseline=KEEP, by=Checkpoint.name, cost=_cost(option, provenance),
                baseline_cost=_cost(full, provenance), why=_why(option, full),
                settings={"keep": tuple(sorted(option.kept)), "remade_from": origin},
            )  # fmt: skip
        yield from of_values(self.cut, self.chosen)

    def not_taken(self) -> Iterator[Declined]:
        """Per class of equal blocks with equal choices: the next faster option, with what the step would then
        need.
        """
        pairs = list(enumerate(zip(self.cut.blocks, self.chosen, strict=True)))
        key = lambda pair: (pair[1][0].stage.kind, pair[1][1].label)  # noqa: E731
        for _, run in groupby(sorted(pairs, key=lambda p: (*key(p), p[0])), key=key):
            i, (block, option) = next(run)
            faster = [o for o in self.options[block.stage.kind] if o.seconds < option.seconds]
            if faster and self.budget is not None:
                yield self._declined(i, faster[-1])

    def _declined(self, i: int, other: BlockOption) -> Declined:
        peak = carried_out(self.cut, [*self.chosen[:i], other, *self.chosen[i + 1 :]], self.groups)[
            1
        ].peak_bytes
        saves = self.chosen[i].seconds - other.seconds
        over = excess(peak, self.budget) > 0
        reason = OverBudget(needed=peak, budget=self.budget, saves=saves) if over else WithinGap(saves=saves)
        cost = Cost(seconds=other.seconds, bytes_kept=other.kept_bytes, bytes_transient=other.backward_peak)
        by = Checkpoint.name
        return Declined(
            site=self.cut.blocks[i].name, kind=by, option=other.label, by=by, reason=reason, cost=cost
        )


def _cost(option: BlockOption, provenance: Provenance) -> Cost:
    return Cost(
        seconds=option.seconds,
        bytes_kept=option.kept_bytes,
        bytes_transient=option.backward_peak,
        provenance=provenance,
    )


def _why(option: BlockOption, full: BlockOption) -> Reason:
    if not option.recomputed and not option.forms:
        return Kept()
    return Frees(bytes=full.kept_bytes - option.kept_bytes, seconds=option.seconds)


def of_values(cut: Blocks, chosen: Sequence[BlockOption]) -> list[Decision]:
    """One per block and form that is in use there."""
    found = []
    for block, option in zip(cut.blocks, chosen, strict=True):
        for form in dict.fromkeys(option.forms.values()):
            names, way = [name for name, other in option.forms.items() if other == form], cut.ways[form]
            forms = [f for name in names for f in block.problem.forms[name] if f.name == form]
            size = sum(block.problem.nbytes[name] for name in names)
            cost = Cost(
                seconds=sum(f.seconds + f.out + f.back for f in forms), bytes_kept=sum(f.held for f in forms),
            )  # fmt: skip
            found.append(
                Decision(
                    site=block.name,
                    kind=form,
                    option=f"{len(names)} value{'s' * (len(names) > 1)}, {format_bytes(size)}",
                    baseline="kept",
                    by=way.by,
                    cost=cost,
                    baseline_cost=Cost(bytes_kept=size),
                    why=Because("{name} between forward and backward" + ", exact" * way.exact, (way.said,)),
                    settings={"values": tuple(sorted(names))},
                )
            )
    return found


def notes_of_fronts(cut: Blocks, fronts_of: Mapping[str, BlockFront], host_bytes: int) -> list[Reason]:
    """Host memory, and what the certificate holds for, where values may be held elsewhere.

    `fronts_of`: kind of block → its options.
    """
    kinds = {block.stage.kind for block in cut.blocks if block.problem.forms}
    fronts = [fronts_of[kind] for kind in kinds if kind in fronts_of]
    if not fronts:
        return []
    lines: list[Reason] = []
    if host_bytes:
        room = " of {bytes}" if cut.host.limit is not None else "; its room was not checked"
        figures = (host_bytes, host_bytes, *((cut.host.limit,) if cut.host.limit is not None else ()))
        lines.append(Because("host memory: {bytes} ({} bytes) at its highest" + room, figures))
    cut_off = sum(not front.complete for front in fronts)
    thinned = [front for front in fronts if front.found > len(front.options)]
    if cut_off or thinned:
        parts = [f"{cut_off} searched until the time was up"] * bool(cut_off)
        most = max((front.found for front in thinned), default=0)
        parts += [f"{len(thinned)} thinned (the largest from {most} options)"] * bool(thinned)
        text = "of {} kinds of blocks, {name}: the certificate holds among the options that were left"
        lines.append(Because(text, (len(fronts), ", ".join(parts))))
    return lines
