"""The charts of a plan's HTML page: time, memory and error by kind of decision."""

from __future__ import annotations

from html import escape

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report import figures as f
from effcompile.report.groups import groups, share
from effcompile.report.html_parts import section
from effcompile.report.plots import memory_plot
from effcompile.report.svg import Bar, SvgPart, stacked_bars


def plan_charts(plan: Plan) -> str:
    """Those of its mode that there is something to draw of."""
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


def _time_chart(plan: Plan) -> str:
    """Time of the decided sites by kind, and of everything else, before and after."""
    kinds = list(dict.fromkeys(group.kind for group in groups(plan.decisions)))
    bars = []
    for label, total, baseline in (
        ("before", plan.baseline.seconds, True),
        ("after", plan.predicted.seconds, False),
    ):
        if total is None:
            return ""
        spent = [
            sum((d.baseline_cost if baseline else d.cost).seconds for d in plan.decisions if d.kind == kind)
            for kind in kinds
        ]
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
    parts = [
        SvgPart(name=name, length=size, text=format_bytes(size), colour=i)
        for i, (name, size) in enumerate(timeline.parts.items())
    ]
    where = (
        f"highest in the {timeline.peak_phase} at <code>{escape(timeline.peak_site)}</code> "
        f"<small>{escape(timeline.peak_node)}</small>"
    )
    total = format_bytes(timeline.peak_bytes)
    bars = (
        stacked_bars([Bar(label="at the peak", total=total, parts=tuple(parts))], title="alive at the peak")
        if parts
        else ""
    )
    sizes = " · ".join(f"{part.text} {part.name}" for part in parts)
    return f'<p>{where}</p>{bars}<p class="dim">{escape(sizes)}</p>'


def _memory_chart(plan: Plan) -> str:
    """Weights and the rest of the peak, measured where it was, before and after; the limit as a line."""
    training = plan.goal.mode == "training"
    names = (
        ("parameters, buffers, inputs", "gradients, activations, workspace")
        if training
        else ("weights", "activations and workspace")
    )
    bars = []
    for label, predicted, measured in (
        ("before", plan.baseline, plan.measured_baseline),
        ("after", plan.predicted, plan.measured),
    ):
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
    return stacked_bars(
        bars, title="peak memory", limit=(limit, f"limit {format_bytes(limit)}") if limit else None
    )


def _error_chart(plan: Plan) -> str:
    """Shares of the squared-error budget by group, and what is left."""
    if not plan.goal.max_error:
        return ""
    spending = sorted(
        (g for g in groups(plan.decisions) if g.error_squared > 0), key=lambda g: -g.error_squared
    )
    parts = []
    for colour, group in enumerate(spending):
        part = share(plan, group.error_squared) or 0.0
        parts.append(
            SvgPart(
                name=f"{group.kind} {group.option}", length=part, text=f.format_share(part), colour=colour
            )
        )
    left = max(1 - sum(p.length for p in parts), 0.0)
    total = f.format_share(sum(p.length for p in parts)) + " spent"
    return stacked_bars(
        [
            Bar(
                label="budget",
                total=total,
                parts=(*parts, SvgPart(name="unspent", length=left, text=f.format_share(left), colour=None)),
            )
        ],
        title="share of the squared error allowed",
    )
