"""Print the passes and backends that may be named."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rich.console import Console
from rich.text import Text

from effcompile.report.page import DIM, STRONG, Column, Page, Row


def print_passes(
    tables: Mapping[str, Mapping[str, str]],
    backends: Mapping[str, str],
    optional: Collection[str],
    options: Mapping[str, Mapping[str, Mapping[str, str]]],
    console: Console | None = None,
) -> None:
    """A table for each mode, and one of the backends; `options` (mode → pass → option → default) below each
    pass, where given.
    """
    page = Page(console)
    for mode, known in tables.items():
        _table(
            page,
            f"--pass, {mode}",
            {name: does + " (where named)" * (name in optional) for name, does in known.items()},
            options.get(mode, {}),
        )
        page.blank()
    _table(page, "--backend", backends, {})
    page.blank()
    page.verbatim(
        "next",
        "effcompile plan MODEL --pass no-merge --pass quantize.group_size=64",
        "leaves one out, sets one",
    )


def _table(
    page: Page, title: str, known: Mapping[str, str], options: Mapping[str, Mapping[str, str]]
) -> None:
    rows = []
    for name, does in known.items():
        below = [
            Text(f"--pass {name}.{option}={default}", style=DIM)
            for option, default in options.get(name, {}).items()
        ]
        rows.append(Row(cells=[name, does], below=below))
    page.table([Column(header=title, style=STRONG), Column(fit="wrap")], rows)
