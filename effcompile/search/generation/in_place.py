"""Whether ONNX Runtime's attentions write a cache where it stands, or join past and new rows: one choice of
all layers, by what both are measured to take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from effcompile.backends.base import Backend
from effcompile.backends.onnxruntime.measure_in_place import Sizes, seconds
from effcompile.capture.generation import GenerationStep
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import LoweringError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.passes import Choice, Declined, Option
from effcompile.search.machine import Machine
from effcompile.sites.attention.cached import IN_PLACE, JOINED, KIND, SITE, cached_attentions, left_out

#: The backend that has both.
RUNTIME = "onnxruntime"


def in_place_choices(
    step: GenerationStep, goal: Goal, machine: Machine, backends: Sequence[Backend], chunk: int
) -> tuple[Choice | Declined, ...]:
    """The choice, none where no attention may, and why of each that may not; nothing on another machine, or
    without the runtime.

    `chunk`: tokens of a prompt that are read at once.
    """
    if not machine.here or RUNTIME not in {backend.name for backend in backends}:
        return ()
    declined = tuple(_declined(site, why) for site, why in left_out(step.program))
    found = cached_attentions(step.program)
    if not found:
        return declined
    context, prompt, new = goal.tokens
    chunk = min(chunk, prompt)
    middle = max(chunk, (prompt + chunk) // 2)
    regimes = ((-(-prompt // chunk), middle, chunk), (new, min(context, prompt + max(1, new // 2)), 1))
    joined = in_place = 0.0
    try:
        for (heads, groups, width), layers in Counter((a.heads, a.groups, a.width) for a in found).items():
            for calls, end, count in regimes:
                rows = 1 if count > 1 and end > count else goal.batch  # behind a past one row at a time
                sizes = Sizes(
                    batch=rows, heads=heads, groups=groups, width=width, past=end - count, new=count
                )
                of_joined, of_place = seconds(sizes)
                joined += calls * layers * of_joined * goal.batch / rows
                in_place += calls * layers * of_place * goal.batch / rows
    except LoweringError:
        return (
            _declined(SITE, Unsupported("this version of ONNX Runtime has no operator for it")),
            *declined,
        )
    held = {leaf for each in found for leaf in (each.key, each.value)}
    names = [spec.name for spec in step.program.inputs if spec.name.startswith("past")]
    leaves = [leaf for name, leaf in zip(names, step.layout, strict=True) if name in held]
    copied = sum(leaf.nbytes(leaf.capacity(context), goal.batch) for leaf in leaves)
    by = lambda form, took, kept: Option(  # noqa: E731
        form=form, by=KIND, cost=Cost(seconds=took, bytes_kept=kept, provenance=Provenance.MEASURED)
    )
    options = (by(JOINED, joined, copied), by(IN_PLACE, in_place, 0))
    return (Choice(site=SITE, kind=KIND, baseline=JOINED.name, options=options), *declined)


def _declined(site: str, why: Reason) -> Declined:
    return Declined(site=site, kind=KIND, option=IN_PLACE.name, by=KIND, reason=why)
