"""What a plan says of values that are held elsewhere: decisions per block, host memory, how sure the fronts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from effcompile.core.cost import Cost
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Decision
from effcompile.planner.remat import BlockFront, BlockOption
from effcompile.schedule.blocks import Blocks


def decisions(cut: Blocks, chosen: Sequence[BlockOption]) -> list[Decision]:
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
                    site=block.name, kind=form, option=f"{len(names)} value{'s' * (len(names) > 1)}, {format_bytes(size)}",
                    baseline="kept", by=way.by, cost=cost, baseline_cost=Cost(bytes_kept=size),
                    why=f"{way.said} between forward and backward{', exact' * way.exact}", settings={"values": tuple(sorted(names))},
                )
            )  # fmt: skip
    return found


def notes(cut: Blocks, fronts_of: Mapping[str, BlockFront], host_bytes: int) -> list[str]:
    """Host memory, and what the certificate holds for, where values may be held elsewhere. `fronts_of`: kind of block → its options."""
    kinds = {block.stage.kind for block in cut.blocks if block.problem.forms}
    fronts = [fronts_of[kind] for kind in kinds]
    if not fronts:
        return []
    lines = []
    if host_bytes:
        limit = cut.host.limit
        room = f" of {format_bytes(limit)}" if limit is not None else "; its room was not checked"
        lines.append(f"host memory: {format_bytes(host_bytes)} ({host_bytes} bytes) at its highest{room}")
    cut_off = sum(not front.complete for front in fronts)
    thinned = [front for front in fronts if front.found > len(front.options)]
    if cut_off or thinned:
        parts = [f"{cut_off} searched until the time was up"] * bool(cut_off)
        most = max((front.found for front in thinned), default=0)
        parts += [f"{len(thinned)} thinned (the largest from {most} options)"] * bool(thinned)
        lines.append(f"of {len(fronts)} kinds of blocks, {', '.join(parts)}: the certificate holds among the options that were left")
    return lines
