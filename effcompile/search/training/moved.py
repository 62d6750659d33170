"""Choices that were run and did not hold, and the host memory that values held there took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from effcompile.core.errors import VerificationError
from effcompile.core.findings import HostUse
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.plan import Plan
from effcompile.ops.offload import host_pool
from effcompile.passes import ways
from effcompile.passes.training.base import Case

if TYPE_CHECKING:
    from effcompile.search.training.prepare import Prepared


class RefutedError(VerificationError):
    """A choice was run, and did not hold what it promises. `said`: in words what is therefore not done."""

    def __init__(self, message: str, *, kind: str, option: str, said: str) -> None:
        super().__init__(message)
        self.reason = Unsupported.of("{}", message)
        self.kind, self.option, self.said = kind, option, said


def too_coarse(case: Case, plan: Plan, message: str) -> RefutedError | None:
    """The error of the choice that changes numbers, where the plan has one: of the step first, else the least
    mild way to hold values.

    Of several of the step the one that was taken last: weights in codes are coarser than products in 16 bits.
    """
    for chosen in reversed(case.taken):
        if chosen.changes and not chosen.exact:
            kind, option = chosen.choice.kind, chosen.option.name
            return RefutedError(message, kind=kind, option=option, said=f"{kind}: not {option}")
    known = ways()
    used = {part for d in plan.decisions if d.kind in known for part in (*known[d.kind].parts, d.kind)}
    coarse = [way for way in known.values() if way.name in used and not way.exact and not way.parts]
    return (
        RefutedError(message, kind=coarse[-1].by, option=coarse[-1].name, said=coarse[-1].without)
        if coarse
        else None
    )


@contextlib.contextmanager
def host_use(plan: Plan, prepared: Prepared) -> Iterator[list[Reason]]:
    """A list that has a note on the measured use of the pool when the step that is run inside is done."""
    found: list[Reason] = []
    known = ways()
    if not any(d.kind in known and known[d.kind].on_host for d in plan.decisions):
        yield found
        return
    pool = host_pool(prepared.cut.host.folder)
    pool.reset_peak()
    before = pool.in_use
    yield found
    found.append(HostUse(bytes=pool.peak - before, folder=str(pool.folder)))
