"""What a plan says of values that are held elsewhere: decisions per block, host memory planned and measured, how sure the fronts are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from effcompile.core.cost import Cost
from effcompile.core.errors import VerificationError
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Decision, Plan
from effcompile.ops.offload import host_pool
from effcompile.passes import WAYS
from effcompile.passes.training.base import Case

if TYPE_CHECKING:
    from effcompile.compiler.training.prepare import Prepared
    from effcompile.compiler.training.solve import Schedule

#: How the note on the measured use of host memory begins.
MEASURED = "host memory measured:"


class RefutedError(VerificationError):
    """A choice was run, and did not hold what it promises. `said`: in words what is therefore not done."""

    def __init__(self, message: str, *, kind: str, option: str, said: str) -> None:
        super().__init__(message)
        self.kind, self.option, self.said = kind, option, said


def decisions(best: Schedule) -> list[Decision]:
    """One per block and form that is in use there."""
    found = []
    for block, option in zip(best.prepared.cut.blocks, best.chosen, strict=True):
        for form in dict.fromkeys(option.forms.values()):
            names, way = [name for name, other in option.forms.items() if other == form], best.prepared.cut.ways[form]
            forms = [f for name in names for f in block.problem.forms[name] if f.name == form]
            size = sum(block.problem.nbytes[name] for name in names)
            cost = Cost(
                seconds=sum(f.seconds + f.out + f.back for f in forms), bytes_kept=sum(f.held for f in forms),
            )  # fmt: skip
            found.append(
                Decision(
                    site=block.name, kind=form, option=f"{len(names)} value{'s' * (len(names) > 1)}, {format_bytes(size)}",
                    baseline="kept", by=way.by, cost=cost, baseline_cost=Cost(bytes_kept=size),
                    why=f"{way.said} between forward and backward{', exact' * way.exact}", settings={"values": tuple(sorted(names))},
                )
            )  # fmt: skip
    return found


def notes(best: Schedule) -> list[str]:
    """Host memory, and what the certificate holds for, where values may be held elsewhere."""
    prepared = best.prepared
    kinds = {block.stage.kind for block in prepared.cut.blocks if block.problem.forms}
    fronts = [prepared.fronts[kind] for kind in kinds]
    if not fronts:
        return []
    lines = []
    if best.trace.host_bytes:
        limit = prepared.cut.host.limit
        room = f" of {format_bytes(limit)}" if limit is not None else "; its room was not checked"
        lines.append(f"host memory: {format_bytes(best.trace.host_bytes)} ({best.trace.host_bytes} bytes) at its highest{room}")
    cut_off = sum(not front.complete for front in fronts)
    thinned = [front for front in fronts if front.found > len(front.options)]
    if cut_off or thinned:
        parts = [f"{cut_off} searched until the time was up"] * bool(cut_off)
        most = max((front.found for front in thinned), default=0)
        parts += [f"{len(thinned)} thinned (the largest from {most} options)"] * bool(thinned)
        lines.append(f"of {len(fronts)} kinds of blocks, {', '.join(parts)}: the certificate holds among the options that were left")
    return lines


def too_coarse(case: Case, plan: Plan, message: str) -> RefutedError | None:
    """The error of the choice that changes numbers, where the plan has one: of the step first, else the least mild way to hold values."""
    for chosen in case.taken:
        if chosen.changes and not chosen.exact:
            kind, option = chosen.choice.kind, chosen.option.name
            return RefutedError(message, kind=kind, option=option, said=f"nothing is computed in {option}")
    used = {part for d in plan.decisions if d.kind in WAYS for part in (*WAYS[d.kind].parts, d.kind)}
    coarse = [way for way in WAYS.values() if way.name in used and not way.exact and not way.parts]
    return RefutedError(message, kind=coarse[-1].by, option=coarse[-1].name, said=coarse[-1].without) if coarse else None


@contextlib.contextmanager
def host_use(plan: Plan, prepared: Prepared) -> Iterator[list[str]]:
    """A list that has a note on the measured use of the pool when the step that is run inside is done."""
    found: list[str] = []
    if not any(d.kind in WAYS and WAYS[d.kind].on_host for d in plan.decisions):
        yield found
        return
    pool = host_pool(prepared.cut.host.folder)
    pool.reset_peak()
    before = pool.in_use
    yield found
    found.append(f"{MEASURED} {format_bytes(pool.peak - before)} ({pool.peak - before} bytes) at its highest, in {pool.folder}")
