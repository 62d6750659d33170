"""The least that a backend's plans take, from few prices: a backend that cannot be among the best is not
priced in full.

Every plan holds each linear that an input reaches in one format, alone or merged with others that read the
same, takes one option at each other site, and all else takes no less than nothing. So with c(f, d) the price
of a linear of dims d = (M, K, N) in format f and t(o) that of an option, each plan takes at the least
    Σ over sites of min_o t(o)
    + Σ over groups g of  min( Σ over members d of min_f c(f, d),  min_f c(f, (M, K, Σ N)) )
where a linear that is in no merge is a group by itself. A format is not timed where its arithmetic alone, at
1.5 times the peak that was measured of this machine, takes as long as the best of that linear. Where making
its kernel takes long, the price of what it contains stands for it (`Backend.no_less`), unless that sum is not
beyond. Sites are those of attentions, norms and activations, whose kernels are few and timed in milliseconds;
linears are made and timed in turn until the sum is beyond.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from effcompile.backends import refusal
from effcompile.backends.base import Backend
from effcompile.core import effort
from effcompile.core.cost import Cost
from effcompile.core.errors import EffcompileError
from effcompile.core.findings import Failed
from effcompile.core.reasons import Because, Reason
from effcompile.core.timing import SETTLED
from effcompile.ir.figures import Candidate
from effcompile.ir.formats import WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import Dims, KernelCall, linear_call
from effcompile.passes import Choice, Context, Pass
from effcompile.passes.pricing import price_call, price_linear
from effcompile.passes.same_each_call import constant_linears
from effcompile.search.search import Search
from effcompile.search.shortlist import SHORTLIST
from effcompile.sites.parts import linears, merges

_SAID = (
    "not priced further: some of its linears, attentions, norms and activations take {seconds} alone, the "
    "best plan {seconds}"
)
#: Times the measured peak that nothing exceeds: it was measured in a minute of its own.
_SURELY = 1.5
#: The passes that decide about linears of a plan that is bounded.
_OF_LINEARS = ("quantize", "merge")
#: Those that decide about sites which have no part in any linear; and one that adds options to theirs.
_OF_OTHERS, _ADDS = ("attention", "fuse", "rows"), "predict"

#: Dims of the linears of a group.
Group = tuple[Dims, ...]
#: The call that a call takes no less than, which takes less to time; None where there is none.
NoLess = Callable[[KernelCall], KernelCall | None]


def beyond(search: Search, backend: Backend, plans: Sequence[tuple[Backend, Plan]]) -> Reason | None:
    """Why a backend need not be priced beside those that are; None where it may be among the best, and where
    the bound does not hold.
    """
    goal, machine, regimes = search.goal, search.machine, search.regimes.each
    if not plans or goal.minimize != "time" or goal.reads != "all" or effort.is_high():
        return None
    if not machine.here or machine.target.device != "cpu" or len(regimes) > 1:
        return None
    program = regimes[0].program
    if any(_decides_linears(each, program) for each in search.passes):
        return None
    best = min(plan.certificate.objective for _, plan in plans)
    limit = backend.slack * SHORTLIST * best
    context = search.context(backend)
    others = of_others(search.passes if regimes[0].passes is None else regimes[0].passes, program, context)
    counted, no_less = groups(program), getattr(backend, "no_less", None)
    for bounded in (no_less, None) if no_less is not None else (None,):
        if (found := others + least(counted, context, limit - others, bounded)) > limit:
            return Because(_SAID, (found, best))
    return None


def overtaken(
    search: Search, backends: Iterable[Backend], told: Sequence[Candidate], seconds: float
) -> list[tuple[Backend, Plan]]:
    """Plans of backends that were not priced further, where the best was measured to take longer than their
    linears do, and of those that were not priced beside a plan, where one could not be built.

    `seconds`: of the best; infinite where none was built.
    """
    seconds *= 1 - SETTLED
    failed = seconds == math.inf or any(isinstance(each.note, Failed) for each in told)
    notes = {each.backend: each.note for each in told if each.predicted_seconds is None}
    found: list[tuple[Backend, Plan]] = []
    for backend in backends:
        note = notes.get(backend.name)
        if note is None or isinstance(note, Failed):
            continue
        bounded = isinstance(note, Because) and note.text == _SAID
        beaten = hasattr(backend, "beaten_by") and refusal(backend, search.program, search.goal) is None
        if float(note.figures[0]) < seconds if bounded else failed and beaten:  # type: ignore[attr-defined]
            with suppress(EffcompileError):  # it cannot be planned: the best stays
                found.append((backend, search.plan_for(backend)))
    return found


def groups(program: Program) -> Counter[Group]:
    """How often linears of these dims are merged or alone, in a program; without those of weights alone,
    which may be computed once.
    """
    found = Counter[Group]()
    counted = {site.site for site in constant_linears(program)}
    for merge in merges(program):
        names = {member.site for member in merge.members}
        if not names & counted:
            found[tuple(member.dims for member in merge.members)] += 1
        counted |= names
    found.update((site.dims,) for site in linears(program) if site.site not in counted)
    return found


def of_others(passes: Iterable[Pass], program: Program, context: Context) -> float:
    """Seconds of attentions, norms and activations at the least on the context's backend."""
    passes = list(passes)
    found: dict[str, float] = {}
    for each in passes if all(each.name != _ADDS for each in passes) else ():
        for choice in each.propose(program, context) if each.name in _OF_OTHERS else ():
            if isinstance(choice, Choice):
                seconds = min((option.cost.seconds for option in choice.options), default=0.0)
                found[choice.site] = min(seconds, found.get(choice.site, math.inf))
    return sum(found.values())


def least(counted: Counter[Group], context: Context, limit: float, no_less: NoLess | None = None) -> float:
    """Seconds that they take at the least on the context's backend, summed until they exceed a limit."""
    total = 0.0
    known: dict[Dims, float] = {}

    def of_one(dims: Dims) -> float:
        if dims not in known:
            known[dims] = _best(dims, context, no_less)
        return known[dims]

    for group, count in sorted(counted.items(), key=lambda item: -_multiplications(item[0]) * item[1]):
        if total > limit:
            break
        m, k, _ = group[0]
        together = of_one((m, k, sum(n for _, _, n in group)))
        total += count * min(together, sum(map(of_one, group)))
    return total


def _multiplications(group: Group) -> int:
    return sum(math.prod(dims) for dims in group)


def _best(dims: Dims, context: Context, no_less: NoLess | None) -> float:
    """The least seconds of a linear in any format; 0 where none has a price."""

    def cost_of(held: WeightFormat) -> Cost | None:
        contained = None if no_less is None else no_less(linear_call(held, dims))
        bounded = None if contained is None else price_call(context, contained)
        return bounded or price_linear(context, held, dims)

    best = math.inf
    roofs = {held: context.target.roof(linear_call(held, dims)) / _SURELY for held in context.formats}
    for held in sorted(context.formats, key=roofs.__getitem__):
        if roofs[held] < best and (cost := cost_of(held)) is not None:
            best = min(best, cost.seconds)
    return 0.0 if best == math.inf else best


def _decides_linears(each: Pass, program: Program) -> bool:
    """Whether a pass may give linears another weight than a dense one in one of the formats."""
    return each.name not in _OF_LINEARS and (
        "linear" in each.measured_options() or bool(each.replaced_weights(program))
    )
