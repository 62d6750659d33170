"""What one way of running a block takes: its instants played one by one, in plain Python.

The order is fixed by rule. A recomputed operator u runs right before its first reader in the backward:

    place(u) = min( steps that read a value of u that is not kept,
                    place(w) of recomputed operators w that read such a value )

Operators of one place run in forward order, then the backward step itself. A recomputed value dies after its last
reader, a kept one too. A recomputed operator makes all its values again: those that are kept, or that nobody reads,
are there for that instant. Before step t the backward's own storages take at most min(live_{t−1}, live_t), for what is
there between two steps is there during both.

Given what is kept, what is recomputed follows (`closure`): a value that is read and not kept asks for its operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

from effcompile.errors import UsageError
from effcompile.planner.remat.problem import BlockOption, BlockProblem, Op


@dataclass(frozen=True, slots=True)
class _Instant:
    """One operator of a phase: what it reads, makes, and needs beside."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    extra: int


def simulate_block(problem: BlockProblem, kept: Collection[str], recomputed: Collection[str]) -> tuple[int, int, int, float]:
    """(kept_bytes, forward_peak, backward_peak, seconds) of one way to run a block, as `BlockOption` defines them.

    Raises:
        UsageError: the way is not possible: a value that the backward or a recomputed operator reads is neither kept nor
            recomputed, an operator that may not run again does, a forced value is not kept, or a name is unknown.
    """
    kept, again = frozenset(kept), frozenset(recomputed)
    _possible(problem, kept, again)
    seconds = fsum(op.seconds for op in problem.forward if op.name in again)
    return sum(problem.nbytes[v] for v in kept), _forward_peak(problem, kept), _backward_peak(problem, kept, again), seconds


def closure(problem: BlockProblem, kept: Collection[str]) -> frozenset[str] | None:
    """The operators that must run again when exactly `kept` is kept; None when that is impossible."""
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


def option(problem: BlockProblem, kept: Iterable[str]) -> BlockOption | None:
    """The option that keeps these values and the forced ones, less those that nothing in the backward reads."""
    wanted = frozenset(kept) | problem.forced
    again = closure(problem, wanted)
    if again is None:
        return None
    read = {v for step in problem.backward for v in step.reads} | {v for op in problem.forward if op.name in again for v in op.reads}
    held = frozenset(v for v in wanted if v in read or v in problem.forced)
    order = tuple(op.name for op in problem.forward if op.name in again)
    size, forward, backward, seconds = simulate_block(problem, held, order)
    entering = sum(problem.nbytes[v] for v in held if v in problem.entering)
    return BlockOption(
        kept=held,
        recomputed=order,
        kept_bytes=size,
        forward_peak=forward,
        backward_peak=backward,
        seconds=seconds,
        label=_label(order),
        entering_kept=entering,
    )


def makers(problem: BlockProblem) -> dict[str, Op]:
    """Value → the operator that makes it; entering values have none."""
    return {v: op for op in problem.forward for v in op.makes}


def check_block(problem: BlockProblem) -> None:
    """Refuse a block that contradicts itself.

    Raises:
        UsageError: names used twice, values unknown or without origin, a value read before it is made, negative or non-finite numbers.
    """
    _unique("operator", [op.name for op in problem.forward])
    _unique("backward step", [step.name for step in problem.backward])
    _unique("value", [*problem.entering, *(v for op in problem.forward for v in op.makes)])
    for value, size in problem.nbytes.items():
        if size < 0:
            raise UsageError(f"Value {value!r} has {size} bytes; give 0 or more.")
    there = set(problem.entering)
    for op in problem.forward:
        _known(problem, op.reads, f"operator {op.name!r} reads")
        if early := [v for v in op.reads if v not in there]:
            raise UsageError(f"Operator {op.name!r} reads {early[0]!r} before it is made. Give the operators in forward order.")
        if not 0 <= op.seconds < float("inf") or op.workspace < 0:
            raise UsageError(
                f"Operator {op.name!r} has seconds {op.seconds!r}, workspace {op.workspace!r}; give finite numbers, 0 or more."
            )
        there.update(op.makes)
    for step in problem.backward:
        _known(problem, step.reads, f"backward step {step.name!r} reads")
    _known(problem, there, "the block makes or receives")
    _known(problem, (*problem.leaving, *problem.forced), "leaving or forced is")
    if lost := [v for v in problem.nbytes if v not in there]:
        raise UsageError(f"Value {lost[0]!r} is neither entering nor made by an operator. Leave it out, or name its maker.")


def _unique(what: str, names: Sequence[str]) -> None:
    if twice := [n for n, count in Counter(names).items() if count > 1]:
        raise UsageError(f"Two {what}s of the block are named {twice[0]!r}. Each has one name and one maker.")


def _known(problem: BlockProblem, values: Iterable[str], where: str) -> None:
    if strange := [v for v in values if v not in problem.nbytes]:
        raise UsageError(f"In this block {where} {strange[0]!r}, which has no bytes. Give nbytes, or leave it out of reads.")


def _possible(problem: BlockProblem, kept: frozenset[str], again: frozenset[str]) -> None:
    ops = {op.name: op for op in problem.forward}
    if strange := sorted(again - set(ops)):
        raise UsageError(f"No operator of the block is named {strange[0]!r}. Known: {', '.join(ops)}.")
    _known(problem, kept, "kept is")
    if missing := sorted(problem.forced - kept):
        raise UsageError(f"Value {missing[0]!r} must be kept and is not.")
    if fixed := sorted(n for n in again if not ops[n].repeatable):
        raise UsageError(f"Operator {fixed[0]!r} may not run again.")
    remade = {v for n in again for v in ops[n].makes}
    readers = [(s.name, s.reads) for s in problem.backward] + [(n, ops[n].reads) for n in sorted(again)]
    for name, reads in readers:
        for value in reads:
            if value not in kept and value not in remade:
                raise UsageError(f"{name!r} reads {value!r} in the backward, which is neither kept nor recomputed.")


def _forward_peak(problem: BlockProblem, kept: frozenset[str]) -> int:
    instants = [_Instant(op.reads, op.makes, op.workspace) for op in problem.forward]
    last = len(instants) - 1
    ends = dict.fromkeys((*kept, *problem.leaving), last)
    return _highest(problem.nbytes, instants, dict.fromkeys(problem.entering, 0), ends)


def _backward_peak(problem: BlockProblem, kept: frozenset[str], again: frozenset[str]) -> int:
    instants: list[_Instant] = []
    before, placed = 0, _places(problem, kept, again)
    for t, step in enumerate(problem.backward):
        gap = min(before, step.live)
        for op in placed.get(t, ()):
            copies = sum(problem.nbytes[v] for v in op.makes if v in kept)
            instants.append(_Instant(op.reads, tuple(v for v in op.makes if v not in kept), gap + op.workspace + copies))
        instants.append(_Instant(step.reads, (), step.live))
        before = step.live
    read = {v for i in instants for v in i.reads}
    ends = {v: len(instants) - 1 for v in kept if v not in read}  # forced, and nobody is known to free them
    return _highest(problem.nbytes, instants, dict.fromkeys(kept, 0), ends)


def _places(problem: BlockProblem, kept: frozenset[str], again: frozenset[str]) -> Mapping[int, list[Op]]:
    """Backward step → the operators that run again right before it, in forward order."""
    first: dict[str, int] = {}
    for t, step in enumerate(problem.backward):
        for v in step.reads:
            first.setdefault(v, t)
    placed: dict[int, list[Op]] = {}
    for op in reversed(problem.forward):
        if op.name not in again:
            continue
        reads = [first[v] for v in op.makes if v in first and v not in kept]
        if not reads:
            raise UsageError(f"Operator {op.name!r} is recomputed, but nothing reads what it makes again.")
        place = min(reads)
        placed.setdefault(place, []).insert(0, op)
        for v in op.reads:
            first[v] = min(first.get(v, place), place)
    return placed


def _highest(nbytes: Mapping[str, int], instants: list[_Instant], begins: Mapping[str, int], ends: Mapping[str, int]) -> int:
    """The most bytes alive at an instant. Values are alive from their making to their last reader, or to `ends`."""
    born, dies = dict(begins), dict.fromkeys(begins, 0)
    for i, instant in enumerate(instants):
        for v in instant.makes:
            born[v] = i
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


def _label(order: Sequence[str]) -> str:
    if not order:
        return "keep all"
    return "recompute " + ", ".join(order[:4]) + (f" and {len(order) - 4} more" if len(order) > 4 else "")
