"""The plan as one self-contained HTML file: no network, one small script of its own, light and dark, every
text escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from effcompile.core.units import format_bytes, format_count, format_error, format_seconds
from effcompile.ir.plan import Decision, Plan
from effcompile.report import figures as f
from effcompile.report import levers as lever_table
from effcompile.report.chart import dots_of, letter
from effcompile.report.devices_html import devices_sections
from effcompile.report.frontier import TITLES, Other, inference_row, other_row, title, training_row
from effcompile.report.groups import DecisionGroup, groups, refusals
from effcompile.report.html_charts import plan_charts
from effcompile.report.html_parts import document, section, table
from effcompile.report.ledger import Ledger, choice, ledger_of
from effcompile.report.names import Template, collapse, inputs_told
from effcompile.report.plots import frontier_plot
from effcompile.report.reasons import words

_VERDICT_CLASS = {
    f.PlanVerdict.MET: "good",
    f.PlanVerdict.NOT_MET: "bad",
    f.PlanVerdict.UNVERIFIED: "warn",
    f.PlanVerdict.PREDICTED: "warn",
}


def html_report(plan: Plan) -> str:
    """The whole document. Nothing in it is computed: sums, shares and ratios of the plan's figures only."""
    return document(f"effcompile · plan for {plan.model}", _plan_sections(plan))


def frontier_html(plans: Sequence[Plan], others: Sequence[Other] = (), command: str = "") -> str:
    """The plot of `print_frontier` and its table as a document of its own.

    `command`: what makes a plan of them, but for the memory.
    """
    training = bool(plans) and plans[0].goal.mode == "training"
    names = (
        ["", *(f"#{name}" for name in TITLES), ""]
        if training
        else ["#peak memory", "#weights", "#time", "#error", "changed"]
    )
    rows = [["●", *training_row(plan), "predicted"] if training else inference_row(plan) for plan in plans]
    if training:
        rows += [
            [letter(number), *other_row(plans, other), f"{other[0]}, measured"]
            for number, other in enumerate(others)
        ]
    head = (
        '<header><p class="brand">effcompile · '
        f"frontier</p><h1>{escape(plans[0].model if plans else 'no plans')}</h1>"
    )
    target = f'<p class="dim">{escape(f.target_text(plans[0]))}</p>' if plans else ""
    plot = frontier_plot(dots_of(plans, others))
    sections = [
        f'{head}<p class="dim">{escape(title(plans))}</p>{target}</header>',
        section("Time against peak memory", plot) if plot else "",
        section("Plans", table(names, [[escape(cell) for cell in row] for row in rows])),
        _commands(plans, command) if command and plans else "",
    ]
    return document(f"effcompile · frontier of {plans[0].model if plans else 'nothing'}", sections)


def _commands(plans: Sequence[Plan], command: str) -> str:
    """How each plan is made, with its predicted peak as the limit."""
    made = [
        f"# {format_bytes(size)}, {format_seconds(plan.predicted.seconds or 0.0)}\n{command} --memory {size}"
        for plan in plans
        if (size := plan.predicted.peak_bytes) is not None
    ]
    return section("Commands", "".join(f"<pre>{escape(each)}</pre>" for each in made))


def _plan_sections(plan: Plan) -> Iterable[str]:
    if plan.distributed is not None:
        return (*devices_sections(plan.distributed, _head(plan)), _declined(plan), _foot(plan))
    return (
        _head(plan),
        _totals(plan),
        plan_charts(plan),
        _levers(plan),
        _proof(plan),
        _backends(plan),
        _decisions(plan),
        _declined(plan),
        _checks(plan),
        _foot(plan),
    )


def _head(plan: Plan) -> str:
    verdict = f.verdict(plan)
    facts = [f"{format_count(plan.parameters)} parameters", plan.goal.mode, *inputs_told(plan.inputs)]
    shortfalls = "".join(f'<p class="bad">{escape(line)}</p>' for line in f.shortfalls(plan))
    return (
        f'<header><p class="brand">effcompile</p><h1>{escape(plan.model)}</h1><p '
        f'class="dim">{escape(" · ".join(facts))}</p>'
        f'<p class="dim">{escape(f.target_text(plan))}</p>'
        '<div class="goal"><div><p '
        f'class="what">{escape(plan.goal.describe())}</p><p>{escape(f.headline(plan))}</p>{shortfalls}</div>'
        f'<strong class="badge {_VERDICT_CLASS[verdict]}">{escape(verdict.value)}</strong></div></header>'
    )


def _totals(plan: Plan) -> str:
    measured = plan.measured is not None or plan.measured_baseline is not None
    span, names = (2, ["predicted", "measured"]) if measured else (1, ["predicted"])
    ratios = ["after ÷ before", *(["predicted ÷ measured"] if measured else [])]
    groups_head = "".join(f'<th colspan="{span}">{name}</th>' for name in ("before", "after"))
    head = f"<tr><th></th>{groups_head}{'<th></th>' * len(ratios)}</tr>"
    # as many cells as a row of figures has: on a narrow page they stand under each other without a table
    head += f"<tr><th></th>{''.join(f'<th>{name}</th>' for name in (*names, *names, *ratios))}</tr>"
    rows = []
    for m in f.measures(plan):
        values = [m.text(v) for pair in (m.before, m.after) for v in (pair if measured else pair[:1])]
        values += [f.format_ratio(m.change), *([f.format_ratio(m.accuracy)] if measured else [])]
        rows.append(f"<tr><th>{m.name}</th>" + "".join(f"<td>{escape(v)}</td>" for v in values) + "</tr>")
    return section(
        "Before and after",
        '<div class="scroll"><table '
        f'class="numbers"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>',
    )


def _levers(plan: Plan) -> str:
    """What each memory lever reaches alone, and together."""
    if not plan.levers:
        return ""
    names = [lever_table.TITLES[0], *(f"#{name}" for name in lever_table.TITLES[1:])]
    rows = [[escape(cell) for cell in lever_table.lever_cells(plan, row)] for row in plan.levers]
    return section(f"Levers within {format_bytes(plan.goal.memory or 0)}, predicted", table(names, rows))


def _proof(plan: Plan) -> str:
    return section(
        "Proof",
        "".join(
            f"<p>{escape(line)}</p>" for line in (*f.proof(plan.certificate, plan.goal), *f.borne_out(plan))
        ),
    )


def _backends(plan: Plan) -> str:
    rows = []
    for c in sorted(plan.candidates, key=lambda c: c.backend != plan.backend):
        times = [
            f.NONE if s is None else format_seconds(s) for s in (c.predicted_seconds, c.measured_seconds)
        ]
        error = f.NONE if c.error is None else format_error(c.error)
        name = f"<strong>{escape(c.backend)} ●</strong>" if c.backend == plan.backend else escape(c.backend)
        note = words(c.note) or ("" if c.measured_seconds is not None else "not measured")
        rows.append([name, *map(escape, (*times, error)), f'<span class="dim">{escape(note)}</span>'])
    backends = (
        table(["backend", "#predicted", "#measured", "#error", ""], rows)
        if rows
        else f"<p>{escape(plan.backend)}</p>"
    )
    settings = " · ".join(f"{name} {value}" for name, value in plan.settings.items())
    return section(
        "Backend", backends + (f'<p class="dim">settings: {escape(settings)}</p>' if settings else "")
    )


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
    return (
        "<details><summary "
        f'class="row"><span>{where}</span><span>{option}</span>{figures}</summary>{members}</details>'
    )


def _member(plan: Plan, ledger: Ledger, decision: Decision, shared_why: str) -> str:
    figures = _figures(plan, ledger, [decision])
    own = words(decision.why)
    why = f"<small>{escape(own)}</small>" if own != shared_why else ""
    if decision.applied in ("", decision.option):
        applied = f'<span class="dim">{"✔ applied" if decision.applied else ""}</span>'
    else:
        applied = f'<span class="warn">⚠ applied: {escape(decision.applied)}</span>'
    return (
        '<div class="row '
        f'member"><span><code>{escape(decision.site)}</code>{why}</span>{applied}{figures}</div>'
    )


def _figures(plan: Plan, ledger: Ledger, decisions: Sequence[Decision]) -> str:
    return "".join(
        f'<span class="n">{escape(figure.text)}</span>' for figure in ledger.figures(plan, decisions)
    )


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
    return "<br>".join(
        f"<code>{escape(t.text)}</code>" + (f" ({t.count})" if t.count > 1 else "") for t in collapse(sites)
    )


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
        rows.append(
            [
                "· stress",
                escape(c.name),
                escape(format_error(c.error)),
                "none",
                f'<span class="dim">{note}</span>',
            ]
        )
    source = (
        f'<p class="dim">Each option’s error was measured on {escape(plan.calibration_inputs)}.</p>'
        if plan.calibration_inputs
        else ""
    )
    checks = (
        table(["", "check", "#error", "#limit", ""], rows)
        if rows
        else "<p>Nothing was run: this is a prediction.</p>"
    )
    return section("Verification", checks + source)


def _foot(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(words(note))}</li>" for note in plan.notes)
    commands = (
        'model = effcompile.optimize(model, plan="plan.json")   # no solving\neffcompile explain '
        "plan.json SITE"
    )
    if plan.measured is not None and plan.backend == "onnxruntime":
        commands = (
            'onnxruntime.InferenceSession("model.onnx")               # plain ONNX Runtime\n' + commands
        )
    versions = " · ".join(f"{name} {version}" for name, version in plan.versions.items())
    return (
        (section("Notes", f"<ul>{notes}</ul>") if notes else "")
        + section("Next", f"<pre>{escape(commands)}</pre>")
        + f'<footer class="dim">{escape(versions)}<br>fingerprint {escape(plan.fingerprint)}</footer>'
    )
