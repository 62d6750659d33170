"""Answers to questions about a saved plan: where the time goes, the error, the memory; what memory buys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.ir.exchange import held_bytes, less, more
from effcompile.ir.plan import Decision, Plan
from effcompile.report import figures as f
from effcompile.report.groups import HOLDING, share
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
        Row(
            cells=[
                page.cut(item.site, max(page.width - 46, 16)),
                item.kind,
                item.choice,
                *_figures(item, show),
            ]
        )
        for item in items[:top]
    ]
    rest = items[top:]
    if rest:
        parts = [item.part for item in rest if item.part is not None]
        together = Item(
            site=f"{len(rest)} more",
            kind="",
            choice="",
            amount=sum(i.amount for i in rest),
            part=sum(parts) if parts else None,
        )
        rows.append(Row(cells=[Text(together.site, style=DIM), "", "", *_figures(together, show)]))
    kinds = _by_kind(items)
    if len(kinds) > 1:
        page.field("kinds", " · ".join(f"{kind} {f.format_share(part)}" for kind, part in kinds))
        page.blank()
    page.table(
        [
            Column(header="site", fit="cut"),
            Column(header="what"),
            Column(header="choice", fit="cut"),
            Column(header=_HEADERS[by], right=True),
            Column(header="part", right=True),
        ],
        rows,
    )
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
    """Of a call: each site's seconds.

    Of a training step: the seconds that each decision adds to the step that keeps everything.
    """
    whole = plan.predicted.seconds or 0.0
    known = [_item(d, d.cost.seconds, whole) for d in plan.decisions if d.cost.seconds]
    rest = whole - sum(item.amount for item in known)
    name = "the step itself, all kept" if plan.goal.mode == "training" else _OTHERS
    others = (
        [Item(site=name, kind="", choice="", amount=rest, part=rest / whole)] if whole and rest > 0 else []
    )
    return sorted([*known, *others], key=lambda item: -item.amount)


def _by_error(plan: Plan) -> list[Item]:
    """Each site alone, never as one of a group: the error that its option adds."""
    found = [(d, d.cost.error) for d in plan.decisions if d.cost.error_squared]
    items = [
        Item(site=d.site, kind=d.kind, choice=_choice(d), amount=error, part=share(plan, error**2))
        for d, error in found
    ]
    return sorted(items, key=lambda item: -item.amount)


def _by_memory(plan: Plan) -> list[Item]:
    """What lives at the peak: of a training step its parts, then what each decision keeps; of a call the
    weights of each site.
    """
    whole = plan.predicted.peak_bytes or 0
    if plan.memory_timeline is not None:
        parts = [Item(site=name, kind="at the peak", choice="", amount=size, part=_of(size, whole))
                 for name, size in plan.memory_timeline.parts.items()]  # fmt: skip
        kept = [
            Item(
                site=d.site,
                kind=d.kind,
                choice=_choice(d),
                amount=d.cost.bytes_kept,
                part=_of(d.cost.bytes_kept, whole),
            )
            for d in plan.decisions
            if d.cost.bytes_kept and d.kind in HOLDING
        ]
        return sorted(parts, key=lambda item: -item.amount) + sorted(kept, key=lambda item: -item.amount)
    known = [
        _item(d, d.cost.weight_bytes + d.cost.bytes_kept, whole)
        for d in plan.decisions
        if d.cost.weight_bytes or d.cost.bytes_kept
    ]
    rest = whole - sum(item.amount for item in known)
    others = [
        Item(
            site="activations, and weights that are not decided",
            kind="",
            choice="",
            amount=rest,
            part=_of(rest, whole),
        )
    ]
    return sorted([*known, *(others if rest > 0 else [])], key=lambda item: -item.amount)


def _item(decision: Decision, amount: float, whole: float) -> Item:
    return Item(
        site=decision.site,
        kind=decision.kind,
        choice=_choice(decision),
        amount=amount,
        part=_of(amount, whole),
    )


def _of(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def _choice(decision: Decision) -> str:
    return choice(decision.kind, decision.option, decision.baseline)


def _error_title(plan: Plan) -> str:
    limit = (
        f", of the limit {format_error(plan.goal.max_error)}; the part is of its square"
        if plan.goal.max_error
        else ""
    )
    return f"what costs error in {plan.model}: the error that each site alone adds{limit}"


def _memory_title(plan: Plan) -> str:
    peak = f.NONE if plan.predicted.peak_bytes is None else format_bytes(plan.predicted.peak_bytes)
    where = (
        f", in the {plan.memory_timeline.peak_phase} at {plan.memory_timeline.peak_site}"
        if plan.memory_timeline
        else ""
    )
    return f"what holds memory in {plan.model}: predicted peak {peak}{where}"


def _time_title(plan: Plan) -> str:
    whole = f.NONE if plan.predicted.seconds is None else format_seconds(plan.predicted.seconds)
    return (
        f"where the time of {plan.model} goes: predicted {whole} per "
        f"{'step' if plan.goal.mode == 'training' else 'call'}"
    )


RANKINGS: Mapping[str, Callable[[Plan], list[Item]]] = {
    "time": _by_time,
    "error": _by_error,
    "memory": _by_memory,
}
_TITLES: Mapping[str, Callable[[Plan], str]] = {
    "time": _time_title,
    "error": _error_title,
    "memory": _memory_title,
}
_SHOW: Mapping[str, Callable[[float], str]] = {
    "time": f.format_saved_seconds,
    "error": format_error,
    "memory": format_bytes,
}
_HEADERS = {"time": "time", "error": "error", "memory": "bytes"}
_NOTHING = {
    "time": "nothing: no time was predicted",
    "error": "nothing: every choice is exact",
    "memory": "nothing is held",
}


def curve(plan: Plan, points: int) -> list[tuple[float, float, str]]:
    """(peak bytes, seconds, what changes) along the exchanges of a plan, least memory first, the plan itself
    among them.

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
    return (
        [front[round(at * (len(front) - 1) / (points - 1))] for at in range(points)]
        if points > 1
        else front[:1]
    )


def _most_freed(plan: Plan) -> float:
    """All that the options of a plan can give back."""
    least: dict[str, float] = {}
    for declined in plan.declined:
        if declined.cost is not None:
            least[declined.site] = min(least.get(declined.site, float("inf")), held_bytes(declined.cost))
    freed = sum(
        max(held_bytes(d.cost) - min(least.get(d.site, float("inf")), held_bytes(d.baseline_cost)), 0)
        for d in plan.decisions
    )
    return freed * (1 - 1e-12)


def print_curve(plan: Plan, points: int, console: Console | None = None) -> None:
    """The curve of a saved plan as rows."""
    page = Page(console)
    _title(page, f"what memory buys {plan.model}, by the options in its plan: an estimate")
    page.blank()
    rows = [
        Row(
            cells=[
                format_bytes(size),
                format_seconds(seconds),
                Text(change, style=STRONG if change == "the plan itself" else ""),
            ]
        )
        for size, seconds, change in curve(plan, points)
    ]
    page.table(
        [
            Column(header="peak memory", right=True),
            Column(header="time", right=True),
            Column(header="last change", fit="cut"),
        ],
        rows,
    )
    if plan.levers:
        page.blank()
        page.field(
            "levers",
            "what each reaches by itself within the budget stands in `effcompile explain`, solved with "
            "the model",
        )
