"""What a little more or less of a limit would change, by the options that a saved plan holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from effcompile.core.errors import UsageError
from effcompile.core.units import format_bytes, format_error, format_seconds, parse_bytes
from effcompile.ir.exchange import Exchange, error_squared, held_bytes, settled
from effcompile.ir.plan import Plan
from effcompile.report.page import DIM, STRONG, Cell, Column, Page, Row
from effcompile.report.questions import TOP


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What another limit would change, by the options that a plan holds.

    Attributes:
        limit: "memory" or "error". was, now: the limit. binds: whether the plan comes near it, so that more
            of it could be used.
        seconds_was, seconds_now: predicted, before and after the exchanges. exchanges: None where less cannot
            be had.
    """

    limit: str
    was: float
    now: float
    binds: bool
    seconds_was: float
    seconds_now: float | None
    exchanges: tuple[Exchange, ...] | None

    def data(self) -> dict[str, object]:
        """As JSON."""
        return {
            **{
                name: getattr(self, name)
                for name in ("limit", "was", "now", "binds", "seconds_was", "seconds_now")
            },
            "estimate": True,
            "exchanges": None if self.exchanges is None else [asdict(e) for e in self.exchanges],
        }


_AS_THE_GOAL_CALLS_IT = ("max_error", "max-error")
#: A plan that uses less than this part of a limit is not held back by it.
_NEAR = 0.97


def what_if(plan: Plan, question: str) -> WhatIf:
    """The answer to `memory=+10%`, `memory=6GiB`, `error=-20%`, `max_error=0.02`.

    Raises:
        UsageError: no such question, or the plan has no such limit and no such figure.
    """
    name, _, text = question.partition("=")
    limit = "error" if name in _AS_THE_GOAL_CALLS_IT else name
    if limit not in ("memory", "error") or not text:
        raise UsageError(
            f"--if {question!r} is no question. Write memory=+10%, memory=6GiB, error=-20%, or error=0.02."
        )
    used = plan.predicted.peak_bytes if limit == "memory" else plan.predicted.error
    was = (plan.goal.memory if limit == "memory" else plan.goal.max_error) or used
    if not was or plan.predicted.seconds is None:
        other = " A plan with --max-error 0.01 has one." if limit == "error" else ""
        raise UsageError(f"This plan has no {limit} to ask about: its goal is {plan.goal.describe()}.{other}")
    now = _changed(limit, text, float(was))
    resource, room = (held_bytes, now - was) if limit == "memory" else (error_squared, now**2 - was**2)
    binds = used is None or used >= _NEAR * was
    slack = 0.0 if binds or used is None else (was - used if limit == "memory" else was**2 - used**2)
    room = max(room, 0.0) if binds and room >= 0 else min(room + slack, 0.0)
    found = settled(plan, room, resource)
    after = None if found is None else plan.predicted.seconds + sum(e.seconds for e in found)
    return WhatIf(
        limit=limit,
        was=float(was),
        now=now,
        binds=binds,
        seconds_was=plan.predicted.seconds,
        seconds_now=after,
        exchanges=None if found is None else tuple(found),
    )


def print_what_if(plan: Plan, question: str, console: Console | None = None) -> None:
    """The answer in a few lines: what changes, where, at which price, and the command that solves it."""
    page, told = Page(console), what_if(plan, question)
    show = format_bytes if told.limit == "memory" else format_error
    per = "step" if plan.goal.mode == "training" else "call"
    page.field("limit", f"{told.limit} {show(told.was)} → {show(told.now)}")
    page.field("now", f"{format_seconds(told.seconds_was)} per {per}, predicted")
    if told.seconds_now is None or told.exchanges is None:
        page.field(
            "then",
            Text(
                "the options in this plan do not give back that much: it has to be solved again", style=STRONG
            ),
        )
    elif not told.exchanges:
        reason = (
            "the plan is not held back by this limit"
            if not told.binds
            else "no option in this plan is faster for that much more"
        )
        page.field(
            "then",
            Text(
                f"the same: {reason if told.now >= told.was else 'the plan is within that limit, too'}",
                style=STRONG,
            ),
        )
    else:
        page.field(
            "then",
            Text(f"about {format_seconds(told.seconds_now)} per {per} ({_change(told)})", style=STRONG),
        )
        page.field("slope", _slope(told))
        _exchanged(page, told.exchanges, show if told.limit == "memory" else None)
    page.blank()
    page.field(
        "",
        Text(
            "an estimate from the options in this plan, each at its own price; a solver looks at all of "
            "them together",
            style=DIM,
        ),
    )
    flag = f"--memory {_typed(told.now)}" if told.limit == "memory" else f"--max-error {told.now:.4g}"
    page.verbatim("next", f"effcompile plan MODEL {flag}", "solves it")


def _typed(size: float) -> str:
    """Bytes as they are typed, not fewer: `1.024e+04MiB` is no size."""
    return f"{math.ceil(size / (1 << 20) * 100) / 100:.2f}MiB" if size >= 1 << 20 else f"{math.ceil(size)}"


def _change(told: WhatIf) -> str:
    assert told.seconds_now is not None
    change = told.seconds_now - told.seconds_was
    return f"{'−' if change < 0 else '+'}{format_seconds(abs(change))}"


def _slope(told: WhatIf) -> str:
    assert told.exchanges
    first, last = told.exchanges[0], told.exchanges[-1]
    if told.limit == "error":
        return f"first {first.site}, last {last.site}"
    values = [format_seconds(exchange.slope * (1 << 20)) for exchange in (first, last)]
    return f"{values[0]} for each MiB at first" + (f", {values[1]} at last" if values[0] != values[1] else "")


def _exchanged(page: Page, exchanges: Sequence[Exchange], size: Callable[[float], str] | None) -> None:
    page.blank()
    columns = [
        Column(header="site", fit="cut"),
        Column(header="from", fit="cut"),
        Column(header="to", fit="cut"),
        Column(header="time", right=True),
    ]
    columns += [Column(header="memory", right=True)] * (size is not None)
    rows = []
    for exchange in exchanges[:TOP]:
        cells: list[Cell] = [
            exchange.site,
            exchange.was,
            exchange.option,
            _signed(exchange.seconds, format_seconds),
        ]
        rows.append(Row(cells=[*cells, *([_signed(exchange.used, size)] if size else [])]))
    page.table(columns, rows)
    if len(exchanges) > TOP:
        page.line(page.text(f"   and {len(exchanges) - TOP} more", DIM))


def _signed(value: float, show: Callable[[float], str]) -> str:
    return f"{'−' if value < 0 else '+'}{show(abs(value))}"


def _changed(limit: str, text: str, was: float) -> float:
    """A limit after `+10%`, or as it is given.

    Raises:
        UsageError: neither a percentage nor a limit.
    """
    try:
        if text.endswith("%"):
            now = was * (1 + float(text[:-1].replace("−", "-")) / 100)
        else:
            now = float(parse_bytes(text)) if limit == "memory" else float(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no change of a limit. Write +10%, -20%, or the limit itself: 6GiB, 0.02."
        ) from error
    if not 0 < now < 1 << 62:
        raise UsageError(
            f"{limit} = {text} leaves nothing, or more than any machine has. Write +10%, -20%, or the "
            "limit itself."
        )
    return now
