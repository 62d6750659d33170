"""Print a plan: what was asked, what was got, at what price, how sure it is, what to run now."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from effcompile.core.units import format_count, format_error, format_seconds
from effcompile.ir.figures import Candidate, Check
from effcompile.ir.guards import counted
from effcompile.ir.plan import Decision, Plan
from effcompile.report import figures as f
from effcompile.report.devices import print_devices
from effcompile.report.groups import DecisionGroup, RefusalGroup, groups, refusals
from effcompile.report.ledger import Ledger, LedgerFigure, choice, ledger_of
from effcompile.report.levers import print_levers
from effcompile.report.names import Template, collapse, inputs_told, printed
from effcompile.report.page import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Page, Row
from effcompile.report.reasons import words
from effcompile.report.step import print_memory

_TEMPLATES_SHOWN = 2

VERDICT_STYLE = {
    f.PlanVerdict.MET: GOOD,
    f.PlanVerdict.NOT_MET: BAD,
    f.PlanVerdict.UNVERIFIED: WARN,
    f.PlanVerdict.PREDICTED: WARN,
}


def print_plan(
    plan: Plan, console: Console | None = None, verbose: bool = False, directory: str | None = None
) -> None:
    """Print the plan to the console (default: stdout).

    Args:
        plan: what to print; nothing is recomputed.
        console: gives width, colour and encoding.
        verbose: one row per site instead of one per group, all refusals, package versions.
        directory: where plan.json and the artifact were written, for the commands at the end.
    """
    page = Page(console)
    if plan.distributed is not None:
        print_devices(page, plan, verbose)
        return
    _head(page, plan)
    _goal(page, plan)
    print_totals(page, plan)
    if where := f.where_time_goes(plan):
        page.blank()
        page.field("time", where)
    print_memory(page, plan)
    print_levers(page, plan)
    page.blank()
    page.fields("proof", [*f.proof(plan.certificate, plan.goal), *f.borne_out(plan)])
    _backends(page, plan)
    _decisions(page, plan, verbose)
    _declined(page, plan, verbose)
    _checks(page, plan)
    if plan.guards:
        page.blank()
        page.field("guards", f"{len(plan.guards)} checked at each call: {counted(plan.guards)}")
    if plan.notes:
        page.blank()
        page.fields("notes", list(map(words, plan.notes)))
    if verbose and plan.versions:
        page.blank()
        page.field("versions", " · ".join(f"{name} {version}" for name, version in plan.versions.items()))
    _next(page, plan, directory)


def _head(page: Page, plan: Plan) -> None:
    title = f"plan for {plan.model} ({format_count(plan.parameters)} parameters) · {plan.goal.mode}"
    inputs = page.text(" · ".join(inputs_told(plan.inputs))).plain
    rest = page.cut(page.text(f" · {title}").plain, page.width - len(" effcompile"))
    fits = inputs and cell_len(f" effcompile{rest} - {inputs}") <= page.width
    page.line(
        Text(" "), Text("effcompile", style=STRONG), Text(rest), page.text(f" · {inputs}" if fits else "")
    )
    page.field("target", f.target_text(plan))
    if inputs and not fits:
        page.field("inputs", inputs)
    page.blank()


def _goal(page: Page, plan: Plan) -> None:
    verdict = f.verdict(plan)
    page.field(
        "goal", Text(plan.goal.describe(), style=STRONG), Text(verdict.value, style=VERDICT_STYLE[verdict])
    )
    headline = f.headline(plan)
    if headline:
        page.field("", headline)
    if plan.fit is not None:
        page.field("", Text(f.fit_line(plan.fit), style=STRONG))
    page.fields("", [Text(line, style=BAD) for line in f.shortfalls(plan)])
    page.blank()


def print_totals(page: Page, plan: Plan) -> None:
    """The before and after table; without the measured columns where nothing was measured."""
    measured = plan.measured is not None or plan.measured_baseline is not None
    columns = [Column(header="", style="")]
    for group in ("before", "after"):
        columns.append(Column(header="predicted", group=group, right=True))
        if measured:
            columns.append(Column(header="measured", group=group, right=True, style=STRONG))
    columns.append(Column(header="after ÷\nbefore", right=True))
    if measured:
        columns.append(Column(header="predicted ÷\nmeasured", right=True, style=DIM))
    rows = []
    for measure in f.measures(plan):
        cells: list[Cell] = [measure.name]
        for pair in (measure.before, measure.after):
            cells += [measure.text(value) for value in (pair if measured else pair[:1])]
        cells.append(Text(f.format_ratio(measure.change), style=_change_style(measure.change)))
        rows.append(Row(cells=[*cells, f.format_ratio(measure.accuracy)] if measured else cells))
    page.table(columns, rows)


def _change_style(change: float | None) -> str:
    return "" if change is None or change == 1 else GOOD if change < 1 else WARN


def _backends(page: Page, plan: Plan) -> None:
    if not plan.candidates:
        page.field("backend", plan.backend)
    else:
        page.blank()
        columns = [
            Column(header="backend"),
            Column(header="predicted", right=True),
            Column(header="measured", right=True),
            Column(header="error", right=True),
            Column(fit="wrap", style=DIM),
        ]
        chosen_first = sorted(plan.candidates, key=lambda c: c.backend != plan.backend)
        page.table(columns, [_candidate(c, plan.backend) for c in chosen_first])
    if plan.settings:
        page.field(
            "settings",
            Text(" · ".join(f"{name} {value}" for name, value in plan.settings.items()), style=DIM),
        )


def _candidate(candidate: Candidate, chosen: str) -> Row:
    times = [
        f.NONE if s is None else format_seconds(s)
        for s in (candidate.predicted_seconds, candidate.measured_seconds)
    ]
    error = f.NONE if candidate.error is None else format_error(candidate.error)
    taken = candidate.backend == chosen
    name = Text(f"{'●' if taken else ' '} {candidate.backend}", style=STRONG if taken else "")
    note = words(candidate.note) or ("" if candidate.measured_seconds is not None else "not measured")
    return Row(cells=[name, *times, error, note])


def _decisions(page: Page, plan: Plan, verbose: bool) -> None:
    page.blank()
    found = groups(plan.decisions, ledger_of(plan).worth)
    if not found:
        page.field("choices", "none: no pass found anything to decide in this model")
        return
    ledger = ledger_of(plan)
    columns = [Column(header="what"), Column(header="choice", fit="cut"), Column(header="sites", right=True)]
    columns += [Column(header=name, right=True) for name in ledger.headers]
    if page.wide:
        columns.insert(1, Column(header="where", fit="cut", style=DIM))
    rows: list[Row] = []
    for place, group in enumerate(found):
        kind = "" if place and found[place - 1].kind == group.kind else group.kind
        rows += _group_rows(page, plan, ledger, group, kind, verbose)
    page.table(columns, rows)


def _group_rows(
    page: Page, plan: Plan, ledger: Ledger, group: DecisionGroup, kind: str, verbose: bool
) -> list[Row]:
    option = Text(choice(group.kind, group.option, group.baseline), style=DIM if group.kept else STRONG)
    cells: list[Cell] = [
        kind,
        option,
        str(len(group.decisions)),
        *_figures(ledger.figures(plan, group.decisions)),
    ]
    where: list[Cell] = [] if verbose else _where(group.sites)
    for note, count in group.notes.items():
        line = Text(note + (f" ({count})" if len(group.notes) > 1 else ""), style=DIM)
        where += [line] if page.wide else page.wrap(line, page.width - 5)
    strayed = group.strayed
    if strayed:
        found = ", ".join(dict.fromkeys(d.applied for d in strayed))
        where.append(Text(f"⚠ {len(strayed)} not applied: the artifact holds {found}", style=WARN))
    members = [_site_row(plan, ledger, d, 4 if page.wide else 3) for d in group.decisions] if verbose else []
    if not page.wide:
        return [Row(cells=cells, below=where), *members]
    first, *more = where or [""]
    empty: list[Cell] = [""] * (len(cells) - 1)
    return [Row(cells=[kind, first, *cells[1:]]), *(Row(cells=["", line, *empty]) for line in more), *members]


def _site_row(plan: Plan, ledger: Ledger, decision: Decision, span: int) -> Row:
    """One site of a group: its name across the columns at the left, its own figures."""
    return Row(
        cells=[Text(f"  · {decision.site}", style=DIM), *_figures(ledger.figures(plan, [decision]))],
        span=span,
    )


def _figures(figures: Sequence[LedgerFigure]) -> list[Cell]:
    return [Text(figure.text, style=WARN if figure.worse else "") for figure in figures]


def _where(templates: Sequence[Template]) -> list[Cell]:
    """Two templates, then how many more; three where there are three, as that takes no more room."""
    shown = len(templates) if len(templates) <= _TEMPLATES_SHOWN + 1 else _TEMPLATES_SHOWN
    lines: list[Cell] = [*printed(templates)[:shown]]
    if rest := templates[shown:]:
        lines.append(f"+{len(rest)} more ({sum(t.count for t in rest)})")
    return lines


def _declined(page: Page, plan: Plan, verbose: bool) -> None:
    found = refusals(plan.declined)
    if not found:
        return
    page.blank()
    shown = found if verbose else _most_telling(found, ledger_of(plan).refusals)
    columns = [
        Column(header="declined"),
        Column(header="option", fit="wrap"),
        Column(header="sites", right=True),
    ]
    columns.append(Column(header="reason", fit="wrap"))
    rows = []
    for place, refusal in enumerate(shown):
        kind = "" if place and shown[place - 1].kind == refusal.kind else refusal.kind
        cells = [
            kind,
            refusal.option,
            str(len(refusal.sites)) if any(refusal.sites) else "all",
            refusal.reason,
        ]
        rows.append(Row(cells=cells, below=_refused_where(plan, refusal, verbose)))
    page.table(columns, rows)
    if len(found) > len(shown):
        page.field(
            "",
            Text(
                f"+{len(found) - len(shown)} more groups: --verbose, or effcompile explain plan.json SITE",
                style=DIM,
            ),
        )


def _most_telling(found: Sequence[RefusalGroup], most: int) -> list[RefusalGroup]:
    """At most so many, in their order: what was declined everywhere first, what only follows from decisions
    at other sites last.
    """
    chosen = sorted(found, key=lambda refusal: (any(refusal.sites), refusal.follows))[:most]
    return [refusal for refusal in found if refusal in chosen]


def _refused_where(plan: Plan, refusal: RefusalGroup, verbose: bool) -> list[Cell]:
    """Where an option was declined; nothing when that is every site of its kind."""
    if verbose:
        return [f"· {site}" for site in refusal.sites]
    everywhere = {d.site for d in plan.decisions if d.kind == refusal.kind}
    templates = collapse(refusal.sites)
    if set(refusal.sites) >= everywhere > set() or not any(refusal.sites):
        return []
    rest = templates[1:]
    return [*printed(templates)[:1], *([f"+{len(rest)} more ({sum(t.count for t in rest)})"] if rest else [])]


def _checks(page: Page, plan: Plan) -> None:
    if plan.checks:
        page.blank()
        columns = [
            Column(header="verified"),
            Column(fit="cut"),
            Column(header="error", right=True),
            Column(header="limit", right=True),
        ]
        page.table(
            [*columns, Column(fit="wrap", style=DIM)],
            [_check(check) for check in plan.checks] + [_stress(check) for check in plan.stress],
        )
    if plan.calibration_inputs:
        if not plan.checks:
            page.blank()
        page.field("errors", Text(f"each option's was measured on {plan.calibration_inputs}", style=DIM))


def _check(check: Check) -> Row:
    mark = Text("✔ passed", style=GOOD) if check.passed else Text("✘ failed", style=BAD)
    return Row(
        cells=[mark, check.name, format_error(check.error), format_error(check.limit), words(check.note)]
    )


def _stress(check: Check) -> Row:
    """An error that no limit was promised for."""
    note = "above the limit for usual inputs" if not check.passed else words(check.note)
    return Row(cells=[Text("· stress", style=DIM), check.name, format_error(check.error), "none", note])


def _next(page: Page, plan: Plan, directory: str | None) -> None:
    """Commands that carry on from here, to be copied as they are."""
    page.blank()
    folder = directory.rstrip("/") or "/" if directory else None
    path = f"{folder}/plan.json" if folder else "plan.json"
    lines = [] if folder else [('plan.save("plan.json")', "")]
    built = plan.measured is not None and folder is not None and plan.goal.mode == "inference"
    if built:
        lines.append((f"effcompile run {shlex.quote(folder or '')}", "runs and times it"))
    if built and plan.backend == "onnxruntime":
        lines.append((f'onnxruntime.InferenceSession("{folder}/model.onnx")', "plain ONNX Runtime"))
    if folder is not None and plan.measured is not None and plan.goal.mode == "generation":
        lines.append((f'effcompile run {shlex.quote(folder)} --prompt "…"', "streams the text that follows"))
    lines.append((f'model = effcompile.optimize(model, plan="{path}")', "no solving"))
    explains = [
        f"effcompile explain {shlex.quote(path)} {shlex.quote(d.site)}"
        for d in sorted(plan.decisions, key=ledger_of(plan).worth, reverse=True)
    ]
    if explains:
        fitting = next((command for command in explains if len(command) < page.width - 12), None)
        lines.append((fitting or f"effcompile explain {shlex.quote(path)} SITE", "why, why not"))
    for number, (command, note) in enumerate(lines):
        page.verbatim("next" if number == 0 else "", command, note)
