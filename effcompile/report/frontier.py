"""Print plans along a front, one row each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from effcompile.plan import Plan
from effcompile.report.figures import measures
from effcompile.report.page import DIM, STRONG, Column, Page, Row


def print_frontier(plans: Sequence[Plan], console: Console | None = None) -> None:
    """One row per plan, in the order given: predicted memory, weights, time and error, and how many sites changed."""
    page = Page(console)
    page.line(page.text(f" {plans[0].model}, on {plans[0].backend}: {plans[0].goal.describe()}" if plans else " no plans", STRONG))
    page.blank()
    columns = [Column(header=name, right=True) for name in ("peak memory", "weights", "time", "error")]
    page.table([*columns, Column(header="changed", style=DIM)], [_row(plan) for plan in plans])


def _row(plan: Plan) -> Row:
    time, weights, peak, error = (measure.text(measure.after[0]) for measure in measures(plan))
    changed = sum(decision.option != decision.baseline for decision in plan.decisions)
    return Row(cells=[peak, weights, time, error, f"{changed} of {len(plan.decisions)} sites"])
