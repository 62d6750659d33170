"""The words of an infeasible goal: a sentence for every cause, and what would be possible."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from effcompile.core import causes as c
from effcompile.core.errors import InfeasibleError
from effcompile.core.units import format_bytes, format_error
from effcompile.report.reasons import words

_LISTED = 5


def message(error: InfeasibleError) -> str:
    """All that an error says, as sentences of one line."""
    causes = [sentence(cause, number > 0) for number, cause in enumerate(error.why)]
    return " ".join(filter(None, (*causes, remedy(error), *map(sentence, error.untried))))


def sentence(cause: c.Cause, inner: bool = False) -> str:
    """A cause in words. `inner`: it is the part's, after that of the whole."""
    there = parts(cause)
    listed = " + ".join(f"{format_bytes(size)} of {name}" for name, size in there)
    return f"{head(cause, inner)} {listed}." if there else head(cause, inner)


def remedy(error: InfeasibleError) -> str:
    """The smallest values that would be feasible; "" where they are not known."""
    first, needed = (error.why or (c.Said(""),))[0], error.needed
    if isinstance(first, c.Limits):
        said = " or ".join(limit(name, value) for name, value in error.nearest.items())
        others = ", the other limits unchanged" if len(first.limits) + first.beside > 1 else ""
        return (
            f"The smallest feasible value is {said}{others}."
            if said
            else "More than one limit must be loosened."
        )
    if isinstance(first, c.MachineTooSmall):
        larger = (
            f"Plan for a machine that has {_exactly(needed)}"
            if error.nearest and needed
            else "Plan for a larger machine"
        )
        return f"{larger}, or allow an error (max_error), so that weights and states take fewer bytes."
    if isinstance(first, c.NotReached):
        return "Allow a little more memory."
    if isinstance(first, c.HostMemory) or not needed:
        return ""
    so = " with this" if isinstance(first, c.Update | c.NoRoom) else ""
    return f"The smallest feasible budget{so} is {_exactly(needed)}."


def limit(name: str, value: float) -> str:
    """A limit: `peak memory 620 MiB`, `error 1.0e-2`, `cycles 7`."""
    if name == "memory":
        return f"peak memory {format_bytes(value)}"
    return f"error {format_error(value)}" if name == "max_error" else f"{name} {value:.6g}"


def parts(cause: c.Cause) -> tuple[tuple[str, int], ...]:
    """What is there at once → bytes, where that is the cause."""
    return cause.parts if isinstance(cause, c.Instant | c.Update) else ()


# ------------------------------------------------------------------ the sentences, up to their parts


@singledispatch
def head(cause: c.Cause, inner: bool = False) -> str:
    """What a cause says before its parts, if it has any."""
    raise AssertionError(f"{type(cause).__name__} has no words")


@head.register
def _said(cause: c.Said, inner: bool = False) -> str:
    return cause.text


@head.register
def _limits(cause: c.Limits, inner: bool = False) -> str:
    given = " and ".join(limit(name, value) for name, value in cause.limits)
    return (
        f"No plan is within {given}{': each can be met, but not together' if len(cause.limits) > 1 else ''}."
    )


@head.register
def _contradiction(cause: c.Contradiction, inner: bool = False) -> str:
    named = _listed(f"{site} = {option}" for site, option in cause.options)
    return (
        "No combination of options satisfies what they require of each other, whatever the limits. "
        f"Look at: {named}."
    )


@head.register
def _instant(cause: c.Instant, inner: bool = False) -> str:
    takes = "binds: even with the least kept it takes"
    if inner:
        return (
            f"In the {format_bytes(max(0, cause.budget))} that are left, {cause.phase} {cause.site} {takes}"
        )
    return f"No plan is within {format_bytes(cause.budget)}. {cause.phase.capitalize()} {cause.site} {takes}"


@head.register
def _over_when_run(cause: c.OverWhenRun, inner: bool = False) -> str:
    return (
        f"No plan is within {format_bytes(cause.budget)}: run, the one that was to be took "
        f"{format_bytes(cause.over)} more."
    )


@head.register
def _took_more(cause: c.TookMore, inner: bool = False) -> str:
    return (
        f"That counts the {format_bytes(cause.over)} that a plan took beyond its prediction when it was run."
    )


@head.register
def _host_memory(cause: c.HostMemory, inner: bool = False) -> str:
    return (
        f"No plan is within {format_bytes(cause.budget)} with {format_bytes(cause.host)} of host memory. It "
        f"takes at least {_exactly(cause.needed)} of values offloaded to the host. Allow so much of it, or a "
        f"budget of {_exactly(cause.instead)}."
    )


@head.register
def _update(cause: c.Update, inner: bool = False) -> str:
    return (
        f"With {' and '.join(cause.beside)} the optimizer's step needs {format_bytes(cause.needed)} at "
        "once, for"
    )


@head.register
def _no_room(cause: c.NoRoom, inner: bool = False) -> str:
    beside = " and ".join(f"{name} ({format_bytes(size)})" for name, size in cause.beside)
    return f"With {beside} on the device there is no room left for forward and backward."


@head.register
def _not_reached(cause: c.NotReached, inner: bool = False) -> str:
    return (
        f"No schedule within the budget was found in {cause.rounds} rounds: the simulated peak stayed above "
        f"it, lastly by {format_bytes(cause.over)} at {cause.node}."
    )


@head.register
def _largest_context(cause: c.LargestContext, inner: bool = False) -> str:
    weights = f"the smallest weights within the error ({format_bytes(cause.weights)})"
    if not cause.context:
        return (
            f"No cache fits beside {weights}: a shorter context does not help. Allow more memory, or "
            "more error."
        )
    return f"A context of {cause.context} tokens fits beside {weights}: give context={cause.context}."


@head.register
def _machine(cause: c.MachineTooSmall, inner: bool = False) -> str:
    verdict = "DOES NOT FIT" if cause.certain else "MARGINAL"
    has = f"{verdict}: {cause.target} has {format_bytes(cause.memory_bytes)} of memory"
    if cause.needed is None:
        return f"{has}."
    between = (
        f" ({' to '.join(map(format_bytes, cause.between))} with the model's error)" if cause.between else ""
    )
    return f"{has}; the leanest plan needs {format_bytes(cause.needed)}{between}."


@head.register
def _not_tried(cause: c.NotTried, inner: bool = False) -> str:
    return f"Not tried: {_with_reasons(cause)}."


@head.register
def _others(cause: c.Others, inner: bool = False) -> str:
    return f"Other {cause.of}: {_with_reasons(cause)}."


@head.register
def _undivided(cause: c.Undivided, inner: bool = False) -> str:
    return (
        f"Not tried: micro-batches of the batch of {cause.batch}, with summed gradients (--pass microbatch)."
    )


@head.register
def _refuted(cause: c.Refuted, inner: bool = False) -> str:
    return f"Here {cause.therefore}: {cause.found}."


def _with_reasons(cause: c.NotTried | c.Others) -> str:
    return "; ".join(f"{option} ({words(reason)})" for option, reason in cause.options)


def _exactly(size: int) -> str:
    return f"{format_bytes(size)} ({size} bytes)"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_LISTED]) + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")
