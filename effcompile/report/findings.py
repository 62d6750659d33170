"""Print what `effcompile doctor` found."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from effcompile.report.page import BAD, DIM, GOOD, STRONG, Column, Page, Row

_MARKS = {"ok": ("✔", GOOD), "absent": ("–", DIM), "wrong": ("✘", BAD)}


def print_findings(found: Iterable[tuple[str, str, str, str]], console: Console | None = None) -> None:
    """A row for each (part, status, what was seen, what to do)."""
    page, rows, counts = Page(console), [], dict.fromkeys(_MARKS, 0)
    for part, status, seen, remedy in found:
        counts[status] += 1
        mark, style = _MARKS[status]
        below = [Text(f"→ {remedy}", style=BAD if status == "wrong" else DIM)] if remedy else []
        rows.append(
            Row(
                cells=[
                    Text.assemble((f"{mark} ", style), (part, STRONG)),
                    Text(seen, style=DIM if status == "absent" else ""),
                ],
                below=below,
            )
        )
    page.table([Column(header="part"), Column(header="seen", fit="wrap")], rows)
    page.blank()
    words = [f"{counts['ok']} right", *([f"{counts['absent']} not here"] if counts["absent"] else [])]
    page.line(Text(", ".join([*words, f"{counts['wrong']} wrong"]), style=BAD if counts["wrong"] else GOOD))
