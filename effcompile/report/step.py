"""Print a training step's memory: the chart over the step, and what is alive at its highest instant."""

from __future__ import annotations

from rich.text import Text

from effcompile.core.units import format_bytes
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report.chart import bar, far, memory_chart
from effcompile.report.page import DIM, LABEL, STRONG, Column, Page, Row

_BAR = 26


def print_memory(page: Page, plan: Plan) -> None:
    """The timeline of the plan, if it has one: chart, then the peak and its parts."""
    timeline = plan.memory_timeline
    if timeline is None:
        return
    limit = plan.goal.memory
    page.blank()
    page.line(page.text(" memory over the step", LABEL), page.text(" · predicted", DIM))
    if limit is not None and far(timeline, limit):
        page.field("", Text(f"the budget, {format_bytes(limit)}, is far above", style=DIM))
    for line in memory_chart(timeline, limit, page.width - 1):
        page.line(*(page.text(text, style) for text, style in line))
    _peak(page, timeline)


def _peak(page: Page, timeline: MemoryTimeline) -> None:
    where = f" at {timeline.peak_site}" if timeline.peak_site else ""
    node = f" ({timeline.peak_node})" if timeline.peak_node else ""
    page.field("peak", f"{format_bytes(timeline.peak_bytes)} in the {timeline.peak_phase}{where}{node}")
    columns = [Column(), Column(right=True, style=STRONG), Column(fit="cut"), Column(style="cyan")]
    room, peak = min(_BAR, max(page.width - 56, 4)), max(timeline.peak_bytes, 1)
    rows = [
        Row(cells=[" " * 8, format_bytes(size), name, bar(size / peak, room)])
        for name, size in timeline.parts.items()
    ]
    if rows:
        page.table(columns, rows)
