"""A run as a page of its own: its stages, what they come to, and each stage's plan below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from effcompile.report.html_parts import document, section, table
from effcompile.report.runs import HEADS, RunMachine, StageRow, cells_of, goal_of, lines_of, run_title


def run_html(rows: Sequence[StageRow], machine: RunMachine) -> str:
    """The whole document; nothing in it is computed."""
    goal = f'<p class="dim">{escape(goal_of(rows))}</p>'
    head = f'<header><p class="brand">effcompile · run</p><h1>{escape(run_title(rows))}</h1>{goal}</header>'
    stages = table(
        ["stage", *(f"#{name}" for name in HEADS)], [[escape(cell) for cell in cells_of(row)] for row in rows]
    )
    lines = table(["", ""], [[escape(name), escape(line)] for name, line in lines_of(rows, machine)])
    return document(
        f"effcompile · {run_title(rows)}",
        [head, section("Stages", stages), section("What it comes to", lines)],
    )
