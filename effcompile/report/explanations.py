"""Answer "why this, why not that" for one site of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from effcompile.core.cost import Cost
from effcompile.core.errors import UsageError
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.report import figures as f
from effcompile.report.groups import groups
from effcompile.report.ledger import choice, ledger_of
from effcompile.report.names import collapse, printed
from effcompile.report.page import DIM, GOOD, STRONG, WARN, Cell, Column, Page, Row
from effcompile.report.reasons import words

_LISTED = 6


def explain(plan: Plan, site: str | None = None, console: Console | None = None) -> None:
    """Print one site's decision and every alternative there with its figures; without a site, list the sites.

    Raises:
        UnknownNameError: no such site. UsageError: a part of a name that fits several sites.
    """
    page = Page(console)
    if site is None:
        _sites(page, plan)
    else:
        found = find_site(plan, site)
        _site(page, plan, found)
        if site.startswith(f"{found}."):
            page.blank()
            page.field("", Text(f"{site} is decided with {found}", style=DIM))


def find_site(plan: Plan, name: str) -> str:
    """The site with this name, or the only one that it is a part of, or else the site that it lies within.

    `h.3` finds `transformer.h.3`; `transformer.h.3.mlp`, which is decided with its block, finds it too.

    Raises:
        UnknownNameError: none. UsageError: several.
    """
    known = list(dict.fromkeys(site for site in (*plan.options(), *(d.site for d in plan.declined)) if site))
    if name in known:
        return name
    whole = [s for s in known if f".{name}." in f".{s}."]
    for matches in (
        whole if len(whole) == 1 else [],
        [s for s in known if s.startswith(name)],
        [s for s in known if name in s],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches and name:
            listed = printed(collapse(matches))
            more = f", and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
            raise UsageError(
                f"{name!r} fits {len(matches)} sites. Give one in full: {', '.join(listed[:_LISTED])}{more}."
            )
    return _enclosing(known, name) or plan.decision(name).site


def _enclosing(known: Sequence[str], name: str) -> str | None:
    """The innermost site that this name, in full or without its first parts, lies within; None when there is
    not one only.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:end])
        found = [site for site in known if site == head] or [
            site for site in known if site.endswith(f".{head}")
        ]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _sites(page: Page, plan: Plan) -> None:
    page.line(Text(" "), page.text(f"sites of the plan for {plan.model}", STRONG))
    page.blank()
    rows: list[Row] = []
    found = groups(plan.decisions, ledger_of(plan).worth)
    for place, group in enumerate(found):
        kind = "" if place and found[place - 1].kind == group.kind else group.kind
        option = Text(choice(group.kind, group.option, group.baseline), style=DIM if group.kept else STRONG)
        rows.append(Row(cells=[kind, option, str(len(group.decisions))], below=[*printed(group.sites)]))
    if rows:
        page.table([Column(header="what"), Column(header="choice"), Column(header="sites", right=True)], rows)
    else:
        page.line(page.text("   none: there was nothing to decide", DIM))
    page.blank()
    page.verbatim("next", "effcompile explain plan.json SITE", "a part of the name will do")


def _site(page: Page, plan: Plan, site: str) -> None:
    decision = next((d for d in plan.decisions if d.site == site), None)
    declined = [d for d in plan.declined if d.site == site]
    kind = decision.kind if decision else declined[0].kind
    tail = page.text(f" · {kind}", DIM)
    page.line(
        Text(" "), Text(page.cut(page.text(site).plain, page.width - 1 - tail.cell_len), style=STRONG), tail
    )
    page.blank()
    if decision is None:
        page.field("choice", "nothing was decided here: no option was possible")
    else:
        _decision(page, plan, decision)
    page.blank()
    _alternatives(page, plan, decision, declined)


def _decision(page: Page, plan: Plan, decision: Decision) -> None:
    page.field(
        "choice",
        Text(choice(decision.kind, decision.option, decision.baseline), style=STRONG),
        Text(f"by {decision.by}", style=DIM),
    )
    page.field("why", words(decision.why) or "the cheapest choice that fits with all others")
    if decision.known is not None:
        page.field("known", words(decision.known))
    page.field("costs", _against_baseline(plan, decision))
    thing = "the step" if plan.goal.mode == "training" else "the artifact"
    if not decision.applied:
        if plan.measured is None:
            page.field("applied", Text("not lowered yet", style=DIM))
    elif decision.applied == decision.option:
        page.field("applied", Text(f"✔ {thing} holds {decision.applied}", style=GOOD))
    else:
        page.field("applied", Text(f"⚠ {thing} holds {decision.applied}, not {decision.option}", style=WARN))


def _against_baseline(plan: Plan, decision: Decision) -> str:
    if decision.option == decision.baseline:
        return "nothing: it is what the unplanned model has"
    return (
        f"{decision.cost.provenance.value} against {decision.baseline}: "
        f"{' · '.join(ledger_of(plan).changes(plan, decision))}"
    )


def _alternatives(page: Page, plan: Plan, decision: Decision | None, declined: list[Declined]) -> None:
    columns = [Column(header="option")]
    columns += [Column(header=name, right=True) for name in ledger_of(plan).option_headers]
    columns.append(Column(header="", fit="wrap"))
    rows: list[Row] = []
    if decision is not None:
        rows.append(
            Row(cells=[Text(f"● {decision.option}", style=STRONG), *_costs(plan, decision.cost), "taken"])
        )
        if decision.option != decision.baseline and decision.baseline not in {d.option for d in declined}:
            rows.append(
                Row(cells=[f"  {decision.baseline}", *_costs(plan, decision.baseline_cost), "the baseline"])
            )
    rows += [Row(cells=[f"  {d.option}", *_costs(plan, d.cost), words(d.reason)]) for d in declined]
    page.table(columns, rows)


def _costs(plan: Plan, cost: Cost | None) -> list[Cell]:
    ledger = ledger_of(plan)
    return [f.NONE] * len(ledger.option_headers) if cost is None else [*ledger.option_figures(plan, cost)]
