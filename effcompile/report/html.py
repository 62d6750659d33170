"""The plan as one self-contained HTML file: no network, one small script of its own, light and dark, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from effcompile.core.units import format_bytes, format_count, format_error, format_seconds
from effcompile.ir.plan import Decision, Plan
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report import figures as f
from effcompile.report import levers as lever_table
from effcompile.report.chart import dots_of, letter
from effcompile.report.devices_html import devices_sections
from effcompile.report.frontier import TITLES, Other, inference_row, other_row, title, training_row
from effcompile.report.groups import DecisionGroup, groups, refusals, share
from effcompile.report.ledger import Ledger, choice, ledger_of
from effcompile.report.names import Template, collapse
from effcompile.report.plots import frontier_plot, memory_plot
from effcompile.report.reasons import words
from effcompile.report.script import SCRIPT
from effcompile.report.style import STYLE
from effcompile.report.svg import Bar, SvgPart, stacked_bars

_VERDICT_CLASS = {
    f.PlanVerdict.MET: "good",
    f.PlanVerdict.NOT_MET: "bad",
    f.PlanVerdict.UNVERIFIED: "warn",
    f.PlanVerdict.PREDICTED: "warn",
}


def html_report(plan: Plan) -> str:
    """The whole document. Nothing in it is computed: sums, shares and ratios of the plan's figures only."""
    return document(f"effcompile · plan for {plan.model}", _plan_sections(plan))


def frontier_html(plans: Sequence[Plan], others: Sequence[Other] = ()) -> str:
    """The plot of `print_frontier` and its table as a document of its own."""
    training = bool(plans) and plans[0].goal.mode == "training"
    names = ["", *(f"#{name}" for name in TITLES), ""] if training else ["#peak memory", "#weights", "#time", "#error", "changed"]
    rows = [["●", *training_row(plan), "predicted"] if training else inference_row(plan) for plan in plans]
    if training:
        rows += [[letter(number), *other_row(plans, other), f"{other[0]}, measured"] for number, other in enumerate(others)]
    head = f'<header><p class="brand">effcompile · frontier</p><h1>{escape(plans[0].model if plans else "no plans")}</h1>'
    target = f'<p class="dim">{escape(f.target_text(plans[0]))}</p>' if plans else ""
    plot = frontier_plot(dots_of(plans, others))
    sections = [
        f'{head}<p class="dim">{escape(title(plans))}</p>{target}</header>',
        section("Time against peak memory", plot) if plot else "",
        section("Plans", table(names, [[escape(cell) for cell in row] for row in rows])),
    ]
    return document(f"effcompile · frontier of {plans[0].model if plans else 'nothing'}", sections)


def _plan_sections(plan: Plan) -> Iterable[str]:
    if plan.distributed is not None:
        return (*devices_sections(plan.distributed, _head(plan)), _declined(plan), _foot(plan))
    return (
        _head(plan),
        _totals(plan),
        _charts(plan),
        _levers(plan),
        _proof(plan),
        _backends(plan),
        _decisions(plan),
        _declined(plan),
        _checks(plan),
        _foot(plan),
    )


def document(title: str, sections: Iterable[str]) -> str:
    """A page of its own."""
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(plan: Plan) -> str:
    verdict = f.verdict(plan)
    facts = [f"{format_count(plan.parameters)} parameters", plan.goal.mode, *plan.inputs]
    shortfalls = "".join(f'<p class="bad">{escape(line)}</p>' for line in f.shortfalls(plan))
    return (
        f'<header><p class="brand">effcompile</p><h1>{escape(plan.model)}</h1><p class="dim">{escape(" · ".join(facts))}</p>'
        f'<p class="dim">{escape(f.target_text(plan))}</p>'
        f'<div class="goal"><div><p class="what">{escape(plan.goal.describe())}</p><p>{escape(f.headline(plan))}</p>{shortfalls}</div>'
        f'<strong class="badge {_VERDICT_CLASS[verdict]}">{escape(verdict.value)}</strong></div></header>'
    )


def _totals(plan: Plan) -> str:
    measured = plan.measured is not None or plan.measured_baseline is not None
    span, names = (2, ["predicted", "measured"]) if measured else (1, ["predicted"])
    last = '<th rowspan="2">predicted ÷ measured</th>' if measured else ""
    groups_head = "".join(f'<th colspan="{span}">{name}</th>' for name in ("before", "after"))
    head = f'<tr><th rowspan="2"></th>{groups_head}<th rowspan="2">after ÷ before</th>{last}</tr>'
    head += "<tr>" + "".join(f"<th>{name}</th>" for _ in range(2) for name in names) + "</tr>"
    rows = []
    for m in f.measures(plan):
        values = [m.text(v) for pair in (m.before, m.after) for v in (pair if measured else pair[:1])]
        values += [f.format_ratio(m.change), *([f.format_ratio(m.accuracy)] if measured else [])]
        rows.append(f"<tr><th>{m.name}</th>" + "".join(f"<td>{escape(v)}</td>" for v in values) + "</tr>")
    return section(
        "Before and after", f'<div class="scroll"><table class="numbers"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _charts(plan: Plan) -> str:
    if plan.goal.mode == "training":
        timeline = plan.memory_timeline
        step = memory_plot(timeline, plan.goal.memory) + _peak_chart(timeline) if timeline is not None else ""
        charts = [("Memory over the step, predicted", step), ("Peak memory", _memory_chart(plan))]
        return "\n".join(section(title, chart) for title, chart in charts if chart)
    charts = [
        ("Time by kind of decision, predicted", _time_chart(plan)),
        ("Memory", _memory_chart(plan)),
        ("Error budget, predicted", _error_chart(plan)),
    ]
    return "\n".join(section(title, chart) for title, chart in charts if chart)


def _levers(plan: Plan) -> str:
    """What each memory lever reaches alone, and together."""
    if not plan.levers:
        return ""
    names = [lever_table.TITLES[0], *(f"#{name}" for name in lever_table.TITLES[1:])]
    rows = [[escape(cell) for cell in lever_table.lever_cells(plan, row)] for row in plan.levers]
    return section(f"Levers within {format_bytes(plan.goal.memory or 0)}, predicted", table(names, rows))


def _time_chart(plan: Plan) -> str:
    """Time of the decided sites by kind, and of everything else, before and after."""
    kinds = list(dict.fromkeys(group.kind for group in groups(plan.decisions)))
    bars = []
    for label, total, baseline in (("before", plan.baseline.seconds, True), ("after", plan.predicted.seconds, False)):
        if total is None:
            return ""
        spent = [sum((d.baseline_cost if baseline else d.cost).seconds for d in plan.decisions if d.kind == kind) for kind in kinds]
        if spent:  # a merge or fusion only makes others faster: what it saves comes off the longest segment
            spent[spent.index(max(spent))] += sum(seconds for seconds in spent if seconds < 0)
        parts = [
            SvgPart(name=kind, length=max(s, 0.0), text=format_seconds(s), colour=i)
            for i, (kind, s) in enumerate(zip(kinds, spent, strict=True))
        ]
        rest = max(total - sum(part.length for part in parts), 0.0)
        parts.append(SvgPart(name="everything else", length=rest, text=format_seconds(rest), colour=None))
        bars.append(Bar(label=label, total=format_seconds(total), parts=tuple(parts)))
    return stacked_bars(bars, title="time")


def _peak_chart(timeline: MemoryTimeline) -> str:
    """What is alive at the highest instant, as one bar."""
    parts = [SvgPart(name=name, length=size, text=format_bytes(size), colour=i) for i, (name, size) in enumerate(timeline.parts.items())]
    where = f"highest in the {timeline.peak_phase} at <code>{escape(timeline.peak_site)}</code> <small>{escape(timeline.peak_node)}</small>"
    total = format_bytes(timeline.peak_bytes)
    bars = stacked_bars([Bar(label="at the peak", total=total, parts=tuple(parts))], title="alive at the peak") if parts else ""
    sizes = " · ".join(f"{part.text} {part.name}" for part in parts)
    return f'<p>{where}</p>{bars}<p class="dim">{escape(sizes)}</p>'


def _memory_chart(plan: Plan) -> str:
    """Weights and the rest of the peak, measured where it was, before and after; the limit as a line."""
    training = plan.goal.mode == "training"
    names = ("parameters, buffers, inputs", "gradients, activations, workspace") if training else ("weights", "activations and workspace")
    bars = []
    for label, predicted, measured in (("before", plan.baseline, plan.measured_baseline), ("after", plan.predicted, plan.measured)):
        source = measured if measured is not None and measured.peak_bytes is not None else predicted
        if source.peak_bytes is None:
            continue
        fixed = plan.memory_timeline.parameter_bytes if plan.memory_timeline else source.weight_bytes
        weights = min(fixed or 0, source.peak_bytes)
        rest = source.peak_bytes - weights
        parts = (
            SvgPart(name=names[0], length=weights, text=format_bytes(weights), colour=0),
            SvgPart(name=names[1], length=rest, text=format_bytes(rest), colour=1),
        )
        bars.append(Bar(label=label, total=format_bytes(source.peak_bytes), parts=parts))
    limit = plan.goal.memory
    return stacked_bars(bars, title="peak memory", limit=(limit, f"limit {format_bytes(limit)}") if limit else None)


def _error_chart(plan: Plan) -> str:
    """Shares of the squared-error budget by group, and what is left."""
    if not plan.goal.max_error:
        return ""
    spending = sorted((g for g in groups(plan.decisions) if g.error_squared > 0), key=lambda g: -g.error_squared)
    parts = []
    for colour, group in enumerate(spending):
        part = share(plan, group.error_squared) or 0.0
        parts.append(SvgPart(name=f"{group.kind} {group.option}", length=part, text=f.format_share(part), colour=colour))
    left = max(1 - sum(p.length for p in parts), 0.0)
    total = f.format_share(sum(p.length for p in parts)) + " spent"
    return stacked_bars(
        [Bar(label="budget", total=total, parts=(*parts, SvgPart(name="unspent", length=left, text=f.format_share(left), colour=None)))],
        title="share of the squared error allowed",
    )


def _proof(plan: Plan) -> str:
    return section("Proof", "".join(f"<p>{escape(line)}</p>" for line in (*f.proof(plan.certificate, plan.goal), *f.borne_out(plan))))


def _backends(plan: Plan) -> str:
    rows = []
    for c in sorted(plan.candidates, key=lambda c: c.backend != plan.backend):
        times = [f.NONE if s is None else format_seconds(s) for s in (c.predicted_seconds, c.measured_seconds)]
        error = f.NONE if c.error is None else format_error(c.error)
        name = f"<strong>{escape(c.backend)} ●</strong>" if c.backend == plan.backend else escape(c.backend)
        note = words(c.note) or ("" if c.measured_seconds is not None else "not measured")
        rows.append([name, *map(escape, (*times, error)), f'<span class="dim">{escape(note)}</span>'])
    backends = table(["backend", "#predicted", "#measured", "#error", ""], rows) if rows else f"<p>{escape(plan.backend)}</p>"
    settings = " · ".join(f"{name} {value}" for name, value in plan.settings.items())
    return section("Backend", backends + (f'<p class="dim">settings: {escape(settings)}</p>' if settings else ""))


def _decisions(plan: Plan) -> str:
    ledger = ledger_of(plan)
    found = groups(plan.decisions, ledger.worth)
    if not found:
        return section("Decisions", "<p>None: no pass found anything to decide in this model.</p>")
    rows = "".join(_group(plan, ledger, group) for group in found)
    titles = ("what and where", "choice", *(header.replace("\n", " ") for header in ledger.headers))
    head = f'<div class="row head">{"".join(f"<span>{title}</span>" for title in titles)}</div>'
    return section("Decisions", f'<div class="scroll"><div class="rows">{head}{rows}</div></div>')


def _group(plan: Plan, ledger: Ledger, group: DecisionGroup) -> str:
    strayed = f' <b class="warn">⚠ {len(group.strayed)} not applied</b>' if group.strayed else ""
    where = f"<b>{escape(group.kind)}</b> <small>{_where(group.sites)}</small>{strayed}"
    option = escape(choice(group.kind, group.option, group.baseline))
    option = f'<span class="dim">{option}</span>' if group.kept else f"<b>{option}</b>"
    whys = {words(d.why) for d in group.decisions}
    shared = whys.pop() if len(whys) == 1 else ""
    option += f"<small>{escape(shared)}</small>"
    figures = _figures(plan, ledger, group.decisions)
    members = "".join(_member(plan, ledger, decision, shared) for decision in group.decisions)
    return f'<details><summary class="row"><span>{where}</span><span>{option}</span>{figures}</summary>{members}</details>'


def _member(plan: Plan, ledger: Ledger, decision: Decision, shared_why: str) -> str:
    figures = _figures(plan, ledger, [decision])
    own = words(decision.why)
    why = f"<small>{escape(own)}</small>" if own != shared_why else ""
    if decision.applied in ("", decision.option):
        applied = f'<span class="dim">{"✔ applied" if decision.applied else ""}</span>'
    else:
        applied = f'<span class="warn">⚠ applied: {escape(decision.applied)}</span>'
    return f'<div class="row member"><span><code>{escape(decision.site)}</code>{why}</span>{applied}{figures}</div>'


def _figures(plan: Plan, ledger: Ledger, decisions: Sequence[Decision]) -> str:
    return "".join(f'<span class="n">{escape(figure.text)}</span>' for figure in ledger.figures(plan, decisions))


def _where(templates: Iterable[Template]) -> str:
    texts = [f"<code>{escape(t.text)}</code>" + (f" ({t.count})" if t.count > 1 else "") for t in templates]
    return "<br>".join(texts[:3]) + (f"<br>+{len(texts) - 3} more" if len(texts) > 3 else "")


def _declined(plan: Plan) -> str:
    found = refusals(plan.declined)
    if not found:
        return ""
    rows = []
    for r in found:
        sites = f"<details><summary>{len(r.sites)}</summary>{_all_names(r.sites)}</details>"
        rows.append([f"<b>{escape(r.kind)}</b>", escape(r.option), sites, escape(r.reason)])
    return section("Declined", table(["what", "option", "sites", "reason"], rows))


def _all_names(sites: Sequence[str]) -> str:
    return "<br>".join(f"<code>{escape(t.text)}</code>" + (f" ({t.count})" if t.count > 1 else "") for t in collapse(sites))


def _checks(plan: Plan) -> str:
    rows = []
    for c in plan.checks:
        mark = '<b class="good">✔ passed</b>' if c.passed else '<b class="bad">✘ failed</b>'
        rows.append(
            [
                mark,
                escape(c.name),
                escape(format_error(c.error)),
                escape(format_error(c.limit)),
                f'<span class="dim">{escape(words(c.note))}</span>',
            ]
        )
    for c in plan.stress:
        note = "" if c.passed else "above the limit for usual inputs"
        rows.append(["· stress", escape(c.name), escape(format_error(c.error)), "none", f'<span class="dim">{note}</span>'])
    source = f'<p class="dim">Each option’s error was measured on {escape(plan.calibration_inputs)}.</p>' if plan.calibration_inputs else ""
    checks = table(["", "check", "#error", "#limit", ""], rows) if rows else "<p>Nothing was run: this is a prediction.</p>"
    return section("Verification", checks + source)


def _foot(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(words(note))}</li>" for note in plan.notes)
    commands = 'model = effcompile.optimize(model, plan="plan.json")   # no solving\neffcompile explain plan.json SITE'
    if plan.measured is not None and plan.backend == "onnxruntime":
        commands = 'onnxruntime.InferenceSession("model.onnx")               # plain ONNX Runtime\n' + commands
    versions = " · ".join(f"{name} {version}" for name, version in plan.versions.items())
    return (
        (section("Notes", f"<ul>{notes}</ul>") if notes else "")
        + section("Next", f"<pre>{escape(commands)}</pre>")
        + f'<footer class="dim">{escape(versions)}<br>fingerprint {escape(plan.fingerprint)}</footer>'
    )


def section(title: str, body: str) -> str:
    """A part of a page, under its title."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of already escaped cells; a header that starts with # is a column of numbers."""
    kinds = [' class="n"' if header.startswith("#") else "" for header in headers]
    head = "".join(f"<th{kind}>{escape(header.lstrip('#'))}</th>" for header, kind in zip(headers, kinds, strict=True))
    body = "".join("<tr>" + "".join(f"<td{k}>{cell}</td>" for cell, k in zip(row, kinds, strict=True)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
