"""Print what each memory lever reaches alone, the best two together, and the plan: one budget, one table."""

from __future__ import annotations

from rich.text import Text

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import LeverRow
from effcompile.report.chart import bar
from effcompile.report.figures import format_ratio, ratio
from effcompile.report.page import DIM, GOOD, LABEL, STRONG, Column, Page, Row

#: Headings of the table, in HTML too.
TITLES = ("levers", "step", "÷ before", "peak")
_BAR = 16


def print_levers(page: Page, plan: Plan) -> None:
    """The table, if the plan has one."""
    if not plan.levers:
        return
    page.blank()
    page.line(
        page.text(f" levers within {format_bytes(plan.goal.memory or 0)}", LABEL),
        page.text(" · predicted", DIM),
    )
    columns = [
        Column(header=TITLES[0], fit="wrap"),
        *(Column(header=name, right=True) for name in TITLES[1:]),
        Column(style="cyan"),
    ]
    most = max(row.peak_bytes for row in plan.levers)
    rows = []
    for row in plan.levers:
        fits, chosen = row.seconds is not None, row is plan.levers[-1]
        name, *figures = lever_cells(plan, row)
        style = STRONG if chosen else "" if fits else DIM
        cells = [
            Text(name, style=style),
            *(Text(cell, style=GOOD if chosen and i == 1 else style) for i, cell in enumerate(figures)),
        ]
        rows.append(Row(cells=[*cells, bar(row.peak_bytes / most, _BAR)]))
    page.table(columns, rows)


def lever_cells(plan: Plan, row: LeverRow) -> tuple[str, str, str, str]:
    """Levers, time of the step, its ratio to the unplanned step's, peak."""
    peak = format_bytes(row.peak_bytes)
    if row.seconds is None:
        return (lever_name(plan, row), "does not fit", "", f"≥ {peak}")
    change = format_ratio(ratio(row.seconds, plan.baseline.seconds))
    return (lever_name(plan, row), format_seconds(row.seconds), change, peak)


def lever_name(plan: Plan, row: LeverRow) -> str:
    """What a row is: none of the levers, one alone, the best pair, all."""
    if not row.levers:
        return "none: everything kept"
    if row.every:
        return "every block remade, as HF does" if row.every == 1 else f"one block in {row.every} remade"
    if row is plan.levers[-1]:
        return "all of them: this plan"
    return f"{row.levers[0]} alone" if len(row.levers) == 1 else f"best pair: {' + '.join(row.levers)}"
