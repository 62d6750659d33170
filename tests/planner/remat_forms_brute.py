"""Every way to run a small block whose values may be held in other forms, tried; and random ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st
from remat_brute import blocks

from effcompile.planner.remat import BlockProblem, Residency

Figures = tuple[int, int, int, float, int]  # kept bytes, forward peak, backward peak, seconds, host bytes


def played(problem: BlockProblem, kept: frozenset[str], names: Mapping[str, str]) -> Figures | None:
    """The figures by running the block on sets of live bytes; None when it cannot be run, or holds what
    nothing reads.

    Written apart from the package's simulator: the schedule is a list that grows by insertion, deaths are
    found by looking ahead in it, and the link is a queue that is played event by event.
    """
    forms = {v: next(f for f in problem.forms[v] if f.name == name) for v, name in names.items()}
    held = kept | set(forms)
    if not problem.forced <= kept:
        return None
    schedule: list[tuple[int, str, object]] = [(t, "step", step) for t, step in enumerate(problem.backward)]
    for op in reversed(problem.forward):
        mine = set(op.makes) - held
        at = next((t for t, _, what in schedule if mine & set(what.reads)), None)
        if at is None:
            continue
        if not op.repeatable:
            return None
        schedule.insert(next(i for i, (t, _, _) in enumerate(schedule) if t == at), (at, "again", op))
    need = {v: next((t for t, _, what in schedule if v in what.reads), None) for v in forms}
    if None in need.values():
        return None
    remade = {v for _, kind, what in schedule if kind == "again" for v in what.makes}
    if any(v not in held and v not in remade for _, _, what in schedule for v in what.reads):
        return None
    drawn = {what.name for _, kind, what in schedule if kind == "again"}
    states = sum(op.state for op in problem.forward if op.name in drawn)
    size = sum(problem.nbytes[v] for v in kept) + sum(f.held for f in forms.values()) + states
    again = sum(what.seconds for _, kind, what in schedule if kind == "again") + sum(
        f.seconds for f in forms.values()
    )
    return (
        size,
        _forward(problem, kept, forms, drawn),
        max(_backward(problem, kept, forms, schedule, need), default=size),
        again + _waits(problem, forms, need),
        sum(f.host for f in forms.values()),
    )


def _forward(
    problem: BlockProblem, kept: frozenset[str], forms: Mapping[str, Residency], drawn: set[str]
) -> int:
    """`drawn`: operators that run again, the generator's state before which is kept where they draw."""
    loads, values, packed, states = [], set(problem.entering), 0, 0

    def there() -> int:
        return sum(problem.nbytes[v] for v in values) + packed + states

    def put(v: str) -> None:
        nonlocal packed
        loads.append(there() + forms[v].packed + forms[v].workspace)
        packed += forms[v].packed if forms[v].staged else 0

    def buried(u: int, left: set[str]) -> set[str]:
        later = {v for op in problem.forward[u:] for v in op.reads} | kept | set(problem.leaving) | left
        return {v for v in values if v in later or (v in forms and forms[v].staged and not forms[v].packed)}

    first = [v for v in problem.entering if v in forms]
    for i, v in enumerate(first):
        put(v)
        values = buried(0, set(first[i + 1 :]))
    for u, op in enumerate(problem.forward):
        if op.state and op.name in drawn:
            # it is taken before the operator runs: an instant of its own, after which unread values are gone
            states += op.state
            loads.append(there())
            values = buried(u, set())
        values |= set(op.makes)
        loads.append(there() + op.workspace)
        todo = [v for v in op.makes if v in forms]
        values = buried(u + 1, set(todo))
        for i, v in enumerate(todo):
            put(v)
            values = buried(u + 1, set(todo[i + 1 :]))
    return max(loads, default=sum(problem.nbytes[v] for v in problem.entering))


def _backward(
    problem: BlockProblem,
    kept: frozenset[str],
    forms: Mapping[str, Residency],
    schedule: list,
    need: Mapping[str, int],
) -> list[int]:
    loads = []
    alive = {v: problem.nbytes[v] for v in kept}
    packed = {v: f.packed for v, f in forms.items() if f.packed and f.staged}
    alive.update({v: problem.nbytes[v] for v, f in forms.items() if f.staged and not f.packed})
    done: set[int] = set()
    # generators' states, until their draws are repeated
    waiting = sum(what.state for _, kind, what in schedule if kind == "again")
    for i, (t, kind, what) in enumerate(schedule):
        between = min(problem.backward[t - 1].live if t else 0, problem.backward[t].live)
        if t not in done:
            done.add(t)
            coming = [v for v in forms if need[v] == t]
            alive.update({v: problem.nbytes[v] for v in coming})
            packed.update({v: forms[v].packed for v in coming})
            loads += [
                sum(alive.values()) + sum(packed.values()) + between + forms[v].workspace + waiting
                for v in coming
            ]
            for v in coming:
                del packed[v]
        if kind == "again":
            own = set(kept) | set(forms)
            double = sum(problem.nbytes[v] for v in what.makes if v in own)
            alive.update({v: problem.nbytes[v] for v in what.makes if v not in own})
            loads.append(
                sum(alive.values())
                + sum(packed.values())
                + between
                + what.workspace
                + double
                + waiting
                + what.state
            )
            waiting -= what.state
        else:
            loads.append(sum(alive.values()) + sum(packed.values()) + what.live + waiting)
        later = {v for _, _, other in schedule[i + 1 :] for v in other.reads}
        ever = later | {v for _, _, other in schedule[: i + 1] for v in other.reads}
        alive = {v: b for v, b in alive.items() if v in later or (v in kept and v not in ever)}
    return loads


def _waits(problem: BlockProblem, forms: Mapping[str, Residency], need: Mapping[str, int]) -> float:
    """Seconds that the step waits for the link, which is played as a queue."""
    if problem.hidden is None:
        return sum(f.out + f.back for f in forms.values())
    now = link = 0.0
    for v in problem.entering:
        link += forms[v].out if v in forms else 0.0
    for op in problem.forward:
        now += op.seconds
        for v in op.makes:
            if v in forms:
                link = max(link, now) + forms[v].out
    wait = max(0.0, link - now)
    now = link = 0.0
    arrival = {}
    for v in sorted(forms, key=need.__getitem__):
        link += forms[v].back
        arrival[v] = link
    for t, seconds in enumerate(problem.hidden):
        now = max([now, *(arrival[v] for v in forms if need[v] == t)]) + seconds
    return wait + now - sum(problem.hidden)


def held_ways(problem: BlockProblem) -> Iterator[tuple[frozenset[str], dict[str, str], Figures]]:
    """Every way to hold the values of a block that lets it run, with its figures."""
    values = list(problem.nbytes)
    for choice in product(*((None, "kept", *(f.name for f in problem.forms.get(v, ()))) for v in values)):
        kept = frozenset(v for v, how in zip(values, choice, strict=True) if how == "kept")
        names = {v: how for v, how in zip(values, choice, strict=True) if how not in (None, "kept")}
        figures = played(problem, kept, names)
        if figures is not None:
            yield kept, names, figures


@st.composite
def forms_of(draw: st.DrawFn, size: int, overlap: bool) -> tuple[Residency, ...]:
    """Some of offload, compress, and both."""
    packed = draw(st.integers(0, max(1, size // 2)))
    extra = draw(st.sampled_from([0, 0, 2, 5]))
    link, pack = draw(st.sampled_from([0.25, 0.5, 1.5])), draw(st.sampled_from([0.25, 0.5]))
    every = (
        Residency(name="offload", staged=size if overlap else 0, host=size, out=link, back=2 * link),
        Residency(name="compress", held=packed, staged=packed, packed=packed, workspace=extra, seconds=pack),
        Residency(
            name="both",
            staged=packed if overlap else 0,
            packed=packed,
            host=packed,
            workspace=extra,
            seconds=pack,
            out=link / 4,
            back=link / 2,
        ),
    )
    return tuple(f for f in every if draw(st.booleans()))


@st.composite
def blocks_with_forms(draw: st.DrawFn, values: int) -> BlockProblem:
    """`blocks`, some of whose values have further forms; copies synchronous or overlapped; host bytes scarce
    or not.
    """
    problem = draw(blocks(values))
    overlap = draw(st.booleans())
    free = [
        v
        for v in problem.nbytes
        if v not in problem.leaving and v not in problem.forced and problem.nbytes[v]
    ]
    chosen = draw(st.lists(st.sampled_from(free), max_size=3, unique=True)) if free else []
    return replace(
        problem,
        forms={v: draw(forms_of(problem.nbytes[v], overlap)) for v in chosen},
        hidden=tuple(draw(st.sampled_from([0.0, 0.25, 1.0])) for _ in problem.backward) if overlap else None,
        scarce=draw(st.booleans()),
    )
