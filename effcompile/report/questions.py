"""Answers to questions about a saved plan: where the time goes, the error, the memory; what a little more of a limit would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.units import format_bytes, format_error, format_seconds, parse_bytes
from effcompile.ir.exchange import Exchange, error_squared, held_bytes, less, more, settled
from effcompile.ir.plan import Decision, Plan
from effcompile.report import figures as f
from effcompile.report.groups import share
from effcompile.report.ledger import choice
from effcompile.report.page import DIM, STRONG, Cell, Column, Page, Row

TOP = 12
_OTHERS = "operators about which nothing is decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One row of an answer: a site, what it takes, and which part of the whole that is."""

    site: str
    kind: str
    choice: str
    amount: float
    part: float | None


def ranked(plan: Plan, by: str) -> list[Item]:
    """The sites by time, error or memory, most first; what no decision is about is a row of its own.

    Raises:
        UnknownNameError: by something else.
    """
    if by not in RANKINGS:
        raise UnknownNameError("order", by, RANKINGS)
    return RANKINGS[by](plan)


def print_ranked(plan: Plan, by: str, top: int = TOP, console: Console | None = None) -> None:
    """The first `top` rows of `ranked`, and what the others are together."""
    items, page, show = ranked(plan, by), Page(console), _SHOW[by]
    _title(page, _TITLES[by](plan))
    page.blank()
    if not items:
        page.line(page.text(f"   {_NOTHING[by]}", DIM))
        return
    rows = [
        Row(cells=[page.cut(item.site, max(page.width - 46, 16)), item.kind, item.choice, *_figures(item, show)]) for item in items[:top]
    ]
    rest = items[top:]
    if rest:
        parts = [item.part for item in rest if item.part is not None]
        together = Item(
            site=f"{len(rest)} more", kind="", choice="", amount=sum(i.amount for i in rest), part=sum(parts) if parts else None
        )
        rows.append(Row(cells=[Text(together.site, style=DIM), "", "", *_figures(together, show)]))
    kinds = _by_kind(items)
    if len(kinds) > 1:
        page.field("kinds", " · ".join(f"{kind} {f.format_share(part)}" for kind, part in kinds))
        page.blank()
    page.table([Column(header="site", fit="cut"), Column(header="what"), Column(header="choice", fit="cut"),
                Column(header=_HEADERS[by], right=True), Column(header="part", right=True)], rows)  # fmt: skip
    if rest:
        page.blank()
        page.verbatim("next", f"--top {len(items)}", "shows them all")


def _title(page: Page, text: str) -> None:
    for line in page.wrap(Text(text, style=STRONG), page.width - 1):
        page.line(Text(" "), line)


def _by_kind(items: Sequence[Item]) -> list[tuple[str, float]]:
    """The part of each kind of site, most first."""
    parts: dict[str, float] = {}
    for item in items:
        if item.part is not None:
            kind = item.kind or "the rest"
            parts[kind] = parts.get(kind, 0.0) + item.part
    return sorted(parts.items(), key=lambda pair: -pair[1])


def _figures(item: Item, show: Callable[[float], str]) -> list[Cell]:
    return [show(item.amount), f.format_share(item.part)]


def _by_time(plan: Plan) -> list[Item]:
    """Of a call: each site's seconds. Of a training step: the seconds that each decision adds to the step that keeps everything."""
    whole = plan.predicted.seconds or 0.0
    known = [_item(d, d.cost.seconds, whole) for d in plan.decisions if d.cost.seconds]
    rest = whole - sum(item.amount for item in known)
    name = "the step itself, all kept" if plan.goal.mode == "training" else _OTHERS
    others = [Item(site=name, kind="", choice="", amount=rest, part=rest / whole)] if whole and rest > 0 else []
    return sorted([*known, *others], key=lambda item: -item.amount)


def _by_error(plan: Plan) -> list[Item]:
    """Each site alone, never as one of a group: the error that its option adds."""
    found = [(d, d.cost.error) for d in plan.decisions if d.cost.error_squared]
    items = [Item(site=d.site, kind=d.kind, choice=_choice(d), amount=error, part=share(plan, error**2)) for d, error in found]
    return sorted(items, key=lambda item: -item.amount)


def _by_memory(plan: Plan) -> list[Item]:
    """What lives at the peak: of a training step its parts, then what each decision keeps; of a call the weights of each site."""
    whole = plan.predicted.peak_bytes or 0
    if plan.memory_timeline is not None:
        parts = [Item(site=name, kind="at the peak", choice="", amount=size, part=_of(size, whole))
                 for name, size in plan.memory_timeline.parts.items()]  # fmt: skip
        kept = [Item(site=d.site, kind=d.kind, choice=_choice(d), amount=d.cost.bytes_kept, part=_of(d.cost.bytes_kept, whole))
                for d in plan.decisions if d.cost.bytes_kept]  # fmt: skip
        return sorted(parts, key=lambda item: -item.amount) + sorted(kept, key=lambda item: -item.amount)
    known = [_item(d, d.cost.weight_bytes + d.cost.bytes_kept, whole) for d in plan.decisions if d.cost.weight_bytes or d.cost.bytes_kept]
    rest = whole - sum(item.amount for item in known)
    others = [Item(site="activations, and weights that are not decided", kind="", choice="", amount=rest, part=_of(rest, whole))]
    return sorted([*known, *(others if rest > 0 else [])], key=lambda item: -item.amount)


def _item(decision: Decision, amount: float, whole: float) -> Item:
    return Item(site=decision.site, kind=decision.kind, choice=_choice(decision), amount=amount, part=_of(amount, whole))


def _of(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def _choice(decision: Decision) -> str:
    return choice(decision.kind, decision.option, decision.baseline)


def _error_title(plan: Plan) -> str:
    limit = f", of the limit {format_error(plan.goal.max_error)}; the part is of its square" if plan.goal.max_error else ""
    return f"what costs error in {plan.model}: the error that each site alone adds{limit}"


def _memory_title(plan: Plan) -> str:
    peak = f.NONE if plan.predicted.peak_bytes is None else format_bytes(plan.predicted.peak_bytes)
    where = f", in the {plan.memory_timeline.peak_phase} at {plan.memory_timeline.peak_site}" if plan.memory_timeline else ""
    return f"what holds memory in {plan.model}: predicted peak {peak}{where}"


def _time_title(plan: Plan) -> str:
    whole = f.NONE if plan.predicted.seconds is None else format_seconds(plan.predicted.seconds)
    return f"where the time of {plan.model} goes: predicted {whole} per {'step' if plan.goal.mode == 'training' else 'call'}"


RANKINGS: Mapping[str, Callable[[Plan], list[Item]]] = {"time": _by_time, "error": _by_error, "memory": _by_memory}
_TITLES: Mapping[str, Callable[[Plan], str]] = {"time": _time_title, "error": _error_title, "memory": _memory_title}
_SHOW: Mapping[str, Callable[[float], str]] = {"time": f.format_saved_seconds, "error": format_error, "memory": format_bytes}
_HEADERS = {"time": "time", "error": "error", "memory": "bytes"}
_NOTHING = {"time": "nothing: no time was predicted", "error": "nothing: every choice is exact", "memory": "nothing is held"}


# ------------------------------------------------------------------ what if


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What another limit would change, by the options that a plan holds.

    Attributes:
        limit: "memory" or "error". was, now: the limit. binds: whether the plan comes near it, so that more of it could be used.
        seconds_was, seconds_now: predicted, before and after the exchanges. exchanges: None where less cannot be had.
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
        return {**{name: getattr(self, name) for name in ("limit", "was", "now", "binds", "seconds_was", "seconds_now")},
                "estimate": True, "exchanges": None if self.exchanges is None else [asdict(e) for e in self.exchanges]}  # fmt: skip


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
        raise UsageError(f"--if {question!r} is no question. Write memory=+10%, memory=6GiB, error=-20%, or error=0.02.")
    used = plan.predicted.peak_bytes if limit == "memory" else plan.predicted.error
    was = (plan.goal.memory if limit == "memory" else plan.goal.max_error) or used
    if not was or plan.predicted.seconds is None:
        raise UsageError(f"This plan has no {limit} to ask about: its goal is {plan.goal.describe()}.")
    now = _changed(limit, text, float(was))
    resource, room = (held_bytes, now - was) if limit == "memory" else (error_squared, now**2 - was**2)
    binds = used is None or used >= _NEAR * was
    slack = 0.0 if binds or used is None else (was - used if limit == "memory" else was**2 - used**2)
    room = max(room, 0.0) if binds and room >= 0 else min(room + slack, 0.0)
    found = settled(plan, room, resource)
    after = None if found is None else plan.predicted.seconds + sum(e.seconds for e in found)
    return WhatIf(limit=limit, was=float(was), now=now, binds=binds, seconds_was=plan.predicted.seconds, seconds_now=after,
                  exchanges=None if found is None else tuple(found))  # fmt: skip


def print_what_if(plan: Plan, question: str, console: Console | None = None) -> None:
    """The answer in a few lines: what changes, where, at which price, and the command that solves it."""
    page, told = Page(console), what_if(plan, question)
    show = format_bytes if told.limit == "memory" else format_error
    per = "step" if plan.goal.mode == "training" else "call"
    page.field("limit", f"{told.limit} {show(told.was)} → {show(told.now)}")
    page.field("now", f"{format_seconds(told.seconds_was)} per {per}, predicted")
    if told.seconds_now is None or told.exchanges is None:
        page.field("then", Text("the options in this plan do not give back that much: it has to be solved again", style=STRONG))
    elif not told.exchanges:
        reason = "the plan is not held back by this limit" if not told.binds else "no option in this plan is faster for that much more"
        page.field("then", Text(f"the same: {reason if told.now >= told.was else 'the plan is within that limit, too'}", style=STRONG))
    else:
        page.field("then", Text(f"about {format_seconds(told.seconds_now)} per {per} ({_change(told)})", style=STRONG))
        page.field("slope", _slope(told))
        _exchanged(page, told.exchanges, show if told.limit == "memory" else None)
    page.blank()
    page.field(
        "", Text("an estimate from the options in this plan, each at its own price; a solver looks at all of them together", style=DIM)
    )
    flag = f"--memory {told.now / (1 << 20):.4g}MiB" if told.limit == "memory" else f"--max-error {told.now:.4g}"
    page.verbatim("next", f"effcompile plan MODEL {flag}", "solves it")


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
        cells: list[Cell] = [exchange.site, exchange.was, exchange.option, _signed(exchange.seconds, format_seconds)]
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
        raise UsageError(f"{text!r} is no change of a limit. Write +10%, -20%, or the limit itself: 6GiB, 0.02.") from error
    if not 0 < now < 1 << 62:
        raise UsageError(f"{limit} = {text} leaves nothing, or more than any machine has. Write +10%, -20%, or the limit itself.")
    return now


def curve(plan: Plan, points: int) -> list[tuple[float, float, str]]:
    """(peak bytes, seconds, what changes) along the exchanges of a plan, least memory first, the plan itself among them.

    Raises:
        UsageError: the plan predicts no peak or no time.
    """
    whole, seconds = plan.predicted.peak_bytes, plan.predicted.seconds
    if whole is None or seconds is None:
        raise UsageError("This plan predicts no peak or no time: there is no curve. Plan again.")
    found: list[tuple[float, float, str]] = [(float(whole), seconds, "the plan itself")]
    for exchanges in (less(plan, _most_freed(plan), held_bytes) or [], more(plan, float("inf"), held_bytes)):
        size, time = float(whole), seconds
        for exchange in exchanges:
            size, time = size + exchange.used, time + exchange.seconds
            found.append((size, time, f"{exchange.site}: {exchange.was} → {exchange.option}"))
    found.sort()
    front = [point for at, point in enumerate(found) if all(point[1] < earlier[1] for earlier in found[:at])]
    if len(front) <= points:
        return front
    return [front[round(at * (len(front) - 1) / (points - 1))] for at in range(points)] if points > 1 else front[:1]


def _most_freed(plan: Plan) -> float:
    """All that the options of a plan can give back."""
    least: dict[str, float] = {}
    for declined in plan.declined:
        if declined.cost is not None:
            least[declined.site] = min(least.get(declined.site, float("inf")), held_bytes(declined.cost))
    freed = sum(max(held_bytes(d.cost) - min(least.get(d.site, float("inf")), held_bytes(d.baseline_cost)), 0) for d in plan.decisions)
    return freed * (1 - 1e-12)


def print_curve(plan: Plan, points: int, console: Console | None = None) -> None:
    """The curve of a saved plan as rows."""
    page = Page(console)
    _title(page, f"what memory buys {plan.model}, by the options in its plan: an estimate")
    page.blank()
    rows = [Row(cells=[format_bytes(size), format_seconds(seconds), Text(change, style=STRONG if change == "the plan itself" else "")])
            for size, seconds, change in curve(plan, points)]  # fmt: skip
    page.table([Column(header="peak memory", right=True), Column(header="time", right=True), Column(header="last change", fit="cut")], rows)
    if plan.levers:
        page.blank()
        page.field("levers", "what each reaches by itself within the budget stands in `effcompile explain`, solved with the model")
