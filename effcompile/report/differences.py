"""Print how two plans differ: goals, totals, decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from rich.console import Console
from rich.text import Text

from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.ir.figures import Totals
from effcompile.ir.plan import Plan
from effcompile.report import figures as f
from effcompile.report.names import collapse, printed
from effcompile.report.page import DIM, GOOD, STRONG, WARN, Cell, Column, Page, Row


def diff(a: Plan, b: Plan, console: Console | None = None) -> None:
    """Print goal differences, totals side by side (measured where both were), and decisions that differ,
    grouped.
    """
    page = Page(console)
    page.field("plan a", f"{a.model}: {a.goal.describe()}")
    page.field("plan b", f"{b.model}: {b.goal.describe()}")
    page.blank()
    _settings(page, a, b)
    _totals(page, a, b)
    _decisions(page, a, b)


def _settings(page: Page, a: Plan, b: Plan) -> None:
    pairs = [(name, str(getattr(a, name)), str(getattr(b, name))) for name in ("model", "target", "backend")]
    pairs += [(g.name, _goal_value(a.goal, g.name), _goal_value(b.goal, g.name)) for g in fields(Goal)]
    rows = [Row(cells=[name, left, right]) for name, left, right in pairs if left != right]
    if a.fingerprint != b.fingerprint:
        rows.append(Row(cells=["fingerprint", a.fingerprint[:12], b.fingerprint[:12]]))
    if rows:
        page.table(
            [Column(header="asked"), Column(header="a", fit="cut"), Column(header="b", fit="cut")], rows
        )
    else:
        page.field("asked", "the same goal, model, target and backend")
    page.blank()


def _goal_value(goal: Goal, name: str) -> str:
    value = getattr(goal, name)
    if value is None:
        return f.NONE
    return (
        format_bytes(value)
        if name == "memory"
        else format_error(value)
        if name == "max_error"
        else str(value)
    )


def _totals(page: Page, a: Plan, b: Plan) -> None:
    rows = []
    shows: dict[str, tuple[str, Callable[[float], str]]] = {
        "time": ("seconds", format_seconds),
        "weight bytes": ("weight_bytes", format_bytes),
        "peak memory": ("peak_bytes", format_bytes),
        "error": ("error", format_error),
    }
    if a.goal.mode == b.goal.mode == "training":
        shows = {"time per step": shows["time"], "peak memory": shows["peak memory"], "error": shows["error"]}
    for name, (attribute, show) in shows.items():
        left, right, how = _pair(a, b, attribute)
        change = f.ratio(right, left)
        style = "" if change in (None, 1) else GOOD if change is not None and change < 1 else WARN
        values: list[Cell] = [f.NONE if value is None else show(value) for value in (left, right)]
        rows.append(Row(cells=[name, *values, Text(f.format_ratio(change), style=style), how]))
    columns = [Column(header="result"), Column(header="a", right=True), Column(header="b", right=True)]
    page.table([*columns, Column(header="b ÷ a", right=True), Column(style=DIM)], rows)
    page.blank()


def _pair(a: Plan, b: Plan, attribute: str) -> tuple[float | None, float | None, str]:
    """The figure of both plans from the same source: measured only where both were measured."""
    left, right = (getattr(plan.measured or Totals(), attribute) for plan in (a, b))
    if left is not None and right is not None:
        return left, right, "measured"
    return getattr(a.predicted, attribute), getattr(b.predicted, attribute), "predicted"


def _decisions(page: Page, a: Plan, b: Plan) -> None:
    kinds = {d.site: d.kind for plan in (a, b) for d in plan.decisions}
    left, right = a.options(), b.options()
    differ = {site: (left[site], right[site]) for site in left if site in right and left[site] != right[site]}
    sections = [(left_right, sites) for left_right, sites in _by_change(differ, kinds).items()]
    only = [
        (f"only in {name}", [s for s in mine if s not in other])
        for name, mine, other in (("a", left, right), ("b", right, left))
    ]
    if not differ and not any(sites for _, sites in only):
        page.field("choices", f"the same at all {len(left)} sites")
        return
    columns = [
        Column(header="what"),
        Column(header="a"),
        Column(header="b"),
        Column(header="sites", right=True),
    ]
    rows: list[Row] = []
    for (kind, was, now), sites in sections:
        rows.append(Row(cells=[kind, was, Text(now, style=STRONG), str(len(sites))], below=_names(sites)))
    for title, sites in only:
        for kind, members in _by_kind(sites, kinds).items():
            where = [title, ""] if title.endswith("a") else ["", title]
            rows.append(Row(cells=[kind, *where, str(len(members))], below=_names(members)))
    page.table(columns, rows)
    same = sum(left[s] == right[s] for s in left if s in right)
    page.line(page.text(f"   the same at {same} other sites", DIM))


def _by_change(
    differ: Mapping[str, tuple[str, str]], kinds: Mapping[str, str]
) -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for site, (was, now) in differ.items():
        found.setdefault((kinds[site], was, now), []).append(site)
    return found


def _by_kind(sites: Iterable[str], kinds: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for site in sites:
        found.setdefault(kinds[site], []).append(site)
    return found


def _names(sites: Iterable[str]) -> list[Cell]:
    return [*printed(collapse(sites))]
