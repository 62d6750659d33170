"""What one way of running a block takes: its instants played one by one, in plain Python.

The order is fixed by rule. A recomputed operator u runs right before its first reader in the backward:

    place(u) = min( steps that read a value of u that is not kept,
                    place(w) of recomputed operators w that read such a value )

Operators of one place run in forward order, then the backward step itself. A recomputed value dies after its
last reader, a kept one too. A recomputed operator makes all its values again: those that are kept, or that
nobody reads, are there for that instant. Before step t the backward's own storages take at most
min(live_{t−1}, live_t), for what is there between two steps is there during both.

A value v held in another form is put away right after its maker (entering ones before the first operator),
and dies after its last reader in the forward like one that is not kept. It is restored at step restore(v) =
min( steps that read it, place(w) of recomputed operators w that read it ), with all others of that step,
before the step's recomputed operators; packed copies of a step live until all of them are unpacked. Where
copies run beside the compute (`hidden`), what is on its way to the host lives to the end of the block's
forward, and what comes back from the beginning of its backward: so the link is idle at the borders of the
block's two runs, and what it carries for one block delays no other.

Given what is kept and held in forms, what is recomputed follows (`closure`): a value that is read and not
held asks for its operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

from effcompile.core.errors import UsageError
from effcompile.planner.remat.check import refuse_unknown
from effcompile.planner.remat.problem import BlockOption, BlockProblem, Op, Residency, state_of, with_states


@dataclass(frozen=True, slots=True)
class _Instant:
    """One operator of a phase: what it reads, makes, and needs beside."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    extra: int


def simulate_block(
    problem: BlockProblem,
    kept: Collection[str],
    recomputed: Collection[str],
    forms: Mapping[str, str] | None = None,
) -> tuple[int, int, int, float]:
    """(kept_bytes, forward_peak, backward_peak, seconds) of one way to run a block, as `BlockOption` defines
    them.

    `forms`: value → the form that it is held in.

    Raises:
        UsageError: the way is not possible: a value that the backward or a recomputed operator reads is
            neither held nor recomputed, an operator that may not run again does, a forced value is not kept,
            or a name is unknown.
    """
    kept, again = frozenset(kept), frozenset(recomputed)
    away = _away(problem, kept, forms or {})
    _possible(problem, kept, again, away)
    problem, kept = _with_states(problem, kept, again)
    placed, first = _places(problem, kept | away.keys(), again)
    seconds = fsum(op.seconds for op in problem.forward if op.name in again) + fsum(
        f.seconds for f in away.values()
    )
    return (
        sum(problem.nbytes[v] for v in kept) + sum(f.held for f in away.values()),
        _forward_peak(problem, kept, away),
        _backward_peak(problem, kept, away, placed, first),
        seconds + stall(problem, away, first),
    )


def _with_states(
    problem: BlockProblem, kept: frozenset[str], again: frozenset[str]
) -> tuple[BlockProblem, frozenset[str]]:
    """The block with the states of the draws that are repeated as values, which are kept."""
    states = [state_of(op) for op in problem.forward if op.state and op.name in again]
    return (with_states(problem, again), kept.union(states)) if states else (problem, kept)


def stall(problem: BlockProblem, away: Mapping[str, Residency], first: Mapping[str, int]) -> float:
    """Seconds that the copies of a block add. `first`: value → the backward step that it is restored for.

    With x_v, y_v the link's seconds of v's copies out and back. Synchronous: Σ (x_v + y_v). Else, c(u) and
    b(t) being the seconds of the forward after operator u and of the backward before step t (recomputation
    left out: it only hides more),

        forward   the copies wait for their makers and for each other; the block ends when the last one has:
                  max_u ( Σ_{v made at u or later} x_v − c(u) )⁺     a suffix sum, entering values first
        backward  all are asked for at the beginning, in the order in which they are needed:
                  max_t ( Σ_{v restored at t or before} y_v − b(t) )⁺    a prefix sum

    Both are exact for a link that carries one copy at a time at full speed, and nothing else (POFO; OffMate's
    time = max(compute, link), per block).
    """
    if problem.hidden is None:
        return fsum(s for f in away.values() for s in (f.out, f.back))
    made = {v: u for u, op in enumerate(problem.forward, start=1) for v in op.makes}
    after = [fsum(op.seconds for op in problem.forward[u:]) for u in range(len(problem.forward) + 1)]
    before = [0.0, *accumulate(problem.hidden)]
    leaving = [
        fsum(f.out for v, f in away.items() if made.get(v, 0) >= u) - after[u]
        for u in {made.get(v, 0) for v in away}
    ]
    coming = [
        fsum(f.back for v, f in away.items() if first[v] <= t) - before[t] for t in {first[v] for v in away}
    ]
    return max(0.0, *leaving) + max(0.0, *coming) if away else 0.0


def closure(problem: BlockProblem, kept: Collection[str]) -> frozenset[str] | None:
    """The operators that must run again when exactly `kept` is held, in whatever form; None when that is
    impossible.
    """
    maker = makers(problem)
    again: set[str] = set()
    asked = [v for step in problem.backward for v in step.reads]
    while asked:
        value = asked.pop()
        if value in kept:
            continue
        op = maker.get(value)
        if op is None or not op.repeatable:
            return None
        if op.name not in again:
            again.add(op.name)
            asked.extend(op.reads)
    return frozenset(again)


def option(
    problem: BlockProblem, kept: Iterable[str], forms: Mapping[str, str] | None = None
) -> BlockOption | None:
    """The option that keeps these values and the forced ones, and holds others in forms, less those that
    nothing in the backward reads.
    """
    wanted, others = frozenset(kept) | problem.forced, dict(forms or {})
    again = closure(problem, wanted | others.keys())
    if again is None:
        return None
    read = {v for step in problem.backward for v in step.reads} | {
        v for op in problem.forward if op.name in again for v in op.reads
    }
    held = frozenset(v for v in wanted if v in read or v in problem.forced)
    others = {v: name for v, name in others.items() if v in read}
    order = tuple(op.name for op in problem.forward if op.name in again)
    size, forward, backward, seconds = simulate_block(problem, held, order, others)
    entering = sum(problem.nbytes[v] for v in held if v in problem.entering)
    return BlockOption(
        kept=held,
        recomputed=order,
        kept_bytes=size,
        forward_peak=forward,
        backward_peak=backward,
        seconds=seconds,
        label=_label(order, others),
        entering_kept=entering,
        forms=others,
        host_bytes=sum(f.host for f in _away(problem, held, others).values()),
    )


def in_order_of_need(problem: BlockProblem, option: BlockOption) -> tuple[str, ...]:
    """The values held in other forms, in the order in which the backward needs them."""
    held = option.kept | option.forms.keys()
    first = _places(problem, held, closure(problem, held) or frozenset())[1]
    return tuple(sorted(option.forms, key=lambda v: first.get(v, len(problem.backward))))


def makers(problem: BlockProblem) -> dict[str, Op]:
    """Value → the operator that makes it; entering values have none."""
    return {v: op for op in problem.forward for v in op.makes}


def _away(problem: BlockProblem, kept: frozenset[str], forms: Mapping[str, str]) -> dict[str, Residency]:
    """Value → the form that it is held in."""
    found = {}
    for value, name in forms.items():
        form = next((f for f in problem.forms.get(value, ()) if f.name == name), None)
        if form is None:
            known = ", ".join(f.name for f in problem.forms.get(value, ())) or "none"
            raise UsageError(f"Value {value!r} has no form {name!r}. Its forms: {known}.")
        if value in kept:
            raise UsageError(f"Value {value!r} is kept and held in form {name!r}: one of both.")
        found[value] = form
    return found


def _possible(
    problem: BlockProblem, kept: frozenset[str], again: frozenset[str], away: Mapping[str, Residency]
) -> None:
    ops = {op.name: op for op in problem.forward}
    if strange := sorted(again - set(ops)):
        raise UsageError(f"No operator of the block is named {strange[0]!r}. Known: {', '.join(ops)}.")
    refuse_unknown(problem, kept, "kept is")
    if missing := sorted(problem.forced - kept):
        raise UsageError(f"Value {missing[0]!r} must be kept and is not.")
    if fixed := sorted(n for n in again if not ops[n].repeatable):
        raise UsageError(f"Operator {fixed[0]!r} may not run again.")
    there = {v for n in again for v in ops[n].makes} | kept | away.keys()
    readers = [(s.name, s.reads) for s in problem.backward] + [(n, ops[n].reads) for n in sorted(again)]
    for name, reads in readers:
        for value in reads:
            if value not in there:
                raise UsageError(
                    f"{name!r} reads {value!r} in the backward, which is neither kept nor recomputed."
                )
    if unread := sorted(away.keys() - {v for _, reads in readers for v in reads}):
        raise UsageError(f"Nothing in the backward reads {unread[0]!r}, which is held in another form.")


def _packed(value: str) -> str:
    """The name of a value's packed copy; no value has it."""
    return f"{value} packed"


def _forward_peak(problem: BlockProblem, kept: frozenset[str], away: Mapping[str, Residency]) -> int:
    instants = _put_away(problem.entering, away)
    for op in problem.forward:
        instants += [_Instant(op.reads, op.makes, op.workspace), *_put_away(op.makes, away)]
    last = len(instants) - 1
    staying = [_packed(v) if f.packed else v for v, f in away.items() if f.staged]
    ends = dict.fromkeys((*kept, *problem.leaving, *staying), last)
    sizes = {**problem.nbytes, **{_packed(v): f.packed for v, f in away.items()}}
    return _highest(sizes, instants, dict.fromkeys(problem.entering, 0), ends)


def _put_away(values: Iterable[str], away: Mapping[str, Residency]) -> list[_Instant]:
    """The instants in which values are packed, or copied."""
    return [_Instant((v,), (_packed(v),), away[v].workspace) for v in values if v in away]


def _backward_peak(
    problem: BlockProblem,
    kept: frozenset[str],
    away: Mapping[str, Residency],
    placed: Mapping[int, list[Op]],
    first: Mapping[str, int],
) -> int:
    instants: list[_Instant] = []
    begins = dict.fromkeys((*kept, *(_packed(v) if f.packed else v for v, f in away.items() if f.staged)), 0)
    before = 0
    for t, step in enumerate(problem.backward):
        gap = min(before, step.live)
        instants += _restoring([v for v in away if first[v] == t], away, gap)
        for op in placed.get(t, ()):
            copies = sum(problem.nbytes[v] for v in op.makes if v in kept or v in away)
            fresh = tuple(v for v in op.makes if v not in kept and v not in away)
            instants.append(_Instant(op.reads, fresh, gap + op.workspace + op.state + copies))
        instants.append(_Instant(step.reads, (), step.live))
        before = step.live
    read = {v for i in instants for v in i.reads}
    ends = {v: len(instants) - 1 for v in kept if v not in read}  # forced, and nobody is known to free them
    sizes = {**problem.nbytes, **{_packed(v): f.packed for v, f in away.items()}}
    return _highest(sizes, instants, begins, ends)


def _restoring(values: Sequence[str], away: Mapping[str, Residency], gap: int) -> list[_Instant]:
    """The instants before one step in which these values are restored: all are there at each, packed and
    unpacked.
    """
    if not values:
        return []
    there = (*values, *map(_packed, values))
    return [_Instant(there, there if i == 0 else (), gap + away[v].workspace) for i, v in enumerate(values)]


def _places(
    problem: BlockProblem, held: frozenset[str], again: frozenset[str]
) -> tuple[Mapping[int, list[Op]], Mapping[str, int]]:
    """(backward step → the operators that run again right before it, in forward order; value → the step that
    first needs it).
    """
    first: dict[str, int] = {}
    for t, step in enumerate(problem.backward):
        for v in step.reads:
            first.setdefault(v, t)
    placed: dict[int, list[Op]] = {}
    for op in reversed(problem.forward):
        if op.name not in again:
            continue
        reads = [first[v] for v in op.makes if v in first and v not in held]
        if not reads:
            raise UsageError(f"Operator {op.name!r} is recomputed, but nothing reads what it makes again.")
        place = min(reads)
        placed.setdefault(place, []).insert(0, op)
        for v in op.reads:
            first[v] = min(first.get(v, place), place)
    return placed, first


def _highest(
    nbytes: Mapping[str, int], instants: list[_Instant], begins: Mapping[str, int], ends: Mapping[str, int]
) -> int:
    """The most bytes alive at an instant.

    Values are alive from their making to their last reader, or to `ends`.
    """
    born, dies = dict(begins), dict.fromkeys(begins, 0)
    for i, instant in enumerate(instants):
        for v in instant.makes:
            born.setdefault(v, i)
        for v in (*instant.makes, *instant.reads):
            dies[v] = i
    dies.update({v: max(end, dies.get(v, 0)) for v, end in ends.items()})
    if not instants:
        return sum(nbytes[v] for v in born)
    change = [0] * (len(instants) + 1)
    for v, start in born.items():
        change[start] += nbytes[v]
        change[dies[v] + 1] -= nbytes[v]
    return max(level + instant.extra for level, instant in zip(accumulate(change), instants, strict=False))


def _label(order: Sequence[str], forms: Mapping[str, str]) -> str:
    parts = [
        f"{name} {', '.join(v for v, f in forms.items() if f == name)}"
        for name in sorted(set(forms.values()))
    ]
    if order:
        parts.append(
            "recompute " + ", ".join(order[:4]) + (f" and {len(order) - 4} more" if len(order) > 4 else "")
        )
    return "; ".join(parts) or "keep all"
