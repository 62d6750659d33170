"""Print a run: one row for each stage with its batch, its budget and what it costs, and the whole below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.report.page import STRONG, Column, Page, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage as it is printed.

    Attributes:
        plan: of its step. steps: how many. batch: examples of each.
        rate: the learning rate that holds; None where none was given.
        seconds: that its steps took, of `taken` of them, in this process.
    """

    name: str
    plan: Plan
    steps: int
    batch: int
    rate: float | None = None
    taken: int = 0
    seconds: float = 0.0


def print_run(rows: Sequence[StageRow], console: Console | None = None) -> None:
    """The stages in their order, and what they come to."""
    page = Page(console)
    first = rows[0].plan
    here = "" if all(row.plan.fit is None for row in rows) else f" on {first.target}"
    page.line(Text(f" effcompile · run of {first.model}: {len(rows)} stages{here}", style=STRONG))
    budget = "no limit on memory" if first.goal.memory is None else f"peak memory ≤ {format_bytes(first.goal.memory)}"
    page.line(Text(f" goal      {budget} in every stage"))
    page.blank()
    heads = ("batch", "steps", "peak", "per step", "in all", "learning rate")
    columns = [Column(header="stage"), *(Column(header=head, right=True) for head in heads)]
    page.table(columns, [_row(row) for row in rows])
    page.blank()
    seconds, examples = sum(_whole(row) for row in rows), sum(row.steps * row.batch for row in rows)
    page.line(Text(f" whole     {sum(row.steps for row in rows):,} steps, {examples:,} examples, {format_seconds(seconds)} predicted"))
    if taken := sum(row.taken for row in rows):
        foreseen = sum(row.taken * (row.plan.predicted.seconds or 0.0) for row in rows)
        spent = sum(row.seconds for row in rows)
        page.line(Text(f" measured  {taken:,} steps took {format_seconds(spent)}, {format_seconds(foreseen)} predicted"))


def _row(row: StageRow) -> Row:
    peak = row.plan.peak_bytes
    cells = [
        row.name, f"{row.batch}", f"{row.steps:,}", "–" if peak is None else format_bytes(peak),
        format_seconds(row.plan.predicted.seconds or 0.0), format_seconds(_whole(row)), "–" if row.rate is None else f"{row.rate:.3g}",
    ]  # fmt: skip
    return Row(cells=cells)


def _whole(row: StageRow) -> float:
    return row.steps * (row.plan.predicted.seconds or 0.0)
