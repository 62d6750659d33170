"""Whether the description of a block holds together, before it is simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from effcompile.core.errors import UsageError
from effcompile.planner.remat.problem import BlockProblem


def check_block(problem: BlockProblem) -> None:
    """Refuse a block that contradicts itself.

    Raises:
        UsageError: names used twice, values unknown or without origin, a value read before it is made,
            negative or non-finite numbers.
    """
    _unique("operator", [op.name for op in problem.forward])
    _unique("backward step", [step.name for step in problem.backward])
    _unique("value", [*problem.entering, *(v for op in problem.forward for v in op.makes)])
    for value, size in problem.nbytes.items():
        if size < 0:
            raise UsageError(f"Value {value!r} has {size} bytes; give 0 or more.")
    there = set(problem.entering)
    for op in problem.forward:
        refuse_unknown(problem, op.reads, f"operator {op.name!r} reads")
        if early := [v for v in op.reads if v not in there]:
            raise UsageError(
                f"Operator {op.name!r} reads {early[0]!r} before it is made. Give the operators in "
                "forward order."
            )
        if not 0 <= op.seconds < float("inf") or op.workspace < 0:
            raise UsageError(
                f"Operator {op.name!r} has seconds {op.seconds!r}, workspace {op.workspace!r}; give "
                "finite numbers, 0 or more."
            )
        there.update(op.makes)
    for step in problem.backward:
        refuse_unknown(problem, step.reads, f"backward step {step.name!r} reads")
    refuse_unknown(problem, there, "the block makes or receives")
    refuse_unknown(problem, (*problem.leaving, *problem.forced), "leaving or forced is")
    if lost := [v for v in problem.nbytes if v not in there]:
        raise UsageError(
            f"Value {lost[0]!r} is neither entering nor made by an operator. Leave it out, or name its maker."
        )
    _check_forms(problem)


def _check_forms(problem: BlockProblem) -> None:
    refuse_unknown(problem, problem.forms, "there are forms of")
    if fixed := [
        v for v, forms in problem.forms.items() if forms and (v in problem.leaving or v in problem.forced)
    ]:
        raise UsageError(
            f"Value {fixed[0]!r} leaves the block or is forced, and has forms. Only what this block alone "
            "decides about may."
        )
    for value, forms in problem.forms.items():
        _unique(f"form of {value!r}", [f.name for f in forms])
        for f in forms:
            numbers = (f.held, f.packed, f.host, f.workspace, f.seconds, f.out, f.back)
            if not all(0 <= x < float("inf") for x in numbers):
                raise UsageError(
                    f"Form {f.name!r} of {value!r} has {numbers}; give finite numbers, 0 or more."
                )
            if f.staged not in (f.held, f.packed or problem.nbytes[value]) or f.held not in (0, f.packed):
                raise UsageError(
                    f"Form {f.name!r} of {value!r}: held is 0 or packed, and staged is held, packed, or "
                    "the value itself."
                )
    hidden = problem.hidden or ()
    if problem.hidden is not None and (
        len(hidden) != len(problem.backward) or not all(0 <= s < float("inf") for s in hidden)
    ):
        raise UsageError(
            f"hidden has {len(hidden)} seconds for {len(problem.backward)} backward steps; give one each, "
            "0 or more."
        )


def _unique(what: str, names: Sequence[str]) -> None:
    if twice := [n for n, count in Counter(names).items() if count > 1]:
        raise UsageError(f"Two {what}s of the block are named {twice[0]!r}. Each has one name and one maker.")


def refuse_unknown(problem: BlockProblem, values: Iterable[str], where: str) -> None:
    """Refuse values without bytes.

    Raises:
        UsageError: there is one; `where` says what names it.
    """
    if strange := [v for v in values if v not in problem.nbytes]:
        raise UsageError(
            f"In this block {where} {strange[0]!r}, which has no bytes. Give nbytes, or leave it out of "
            "reads."
        )
