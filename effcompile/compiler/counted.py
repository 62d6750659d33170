"""What each site became in the artifact, beside what was planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from effcompile.backends.base import Lowered
from effcompile.core.reasons import Because
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.merge import MERGED, SEPARATE
from effcompile.passes.precompute import ONCE
from effcompile.sites import parts as sites


def counted(plan: Plan, program: Program, lowered: Lowered) -> Plan:
    """The plan with what each site became in the artifact; a site that is not as planned is told, never
    passed over.
    """
    found = dict(lowered.applied)
    for group in sites.merges(program):
        inside = found.get(group.merged_site)
        found[group.site] = (
            Form(word=SEPARATE) if inside is None else Form(word=MERGED, weights=inside.weights)
        )
        found |= {member.site: inside for member in group.members if inside is not None}
    found |= {d.site: ONCE for d in plan.decisions if d.form == ONCE and d.site not in found}
    decisions = tuple(
        replace(d, applied=_told(d.form, found[d.site]) if d.site in found else "") for d in plan.decisions
    )
    differing = Counter(
        (d.kind, d.option, d.applied) for d in decisions if d.applied and d.applied != d.option
    )
    notes = [
        Because(
            "{} × {name}: planned {name}, the {name} artifact has {name}",
            (count, kind, option, plan.backend, applied),
        )
        for (kind, option, applied), count in sorted(differing.items())
    ]
    return replace(plan, decisions=decisions, notes=(*plan.notes, *notes))


def _told(planned: Form | None, found: Form) -> str:
    """The name of what was found, with all that is known of it where the name alone would say that it is as
    planned.
    """
    alike = planned is not None and planned.name == found.name and not planned.agrees(found)
    return f"{found.name} ({found.weights or found.figures or found.mask})" if alike else found.name
