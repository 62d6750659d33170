"""Parts of an HTML page: the document, sections and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from effcompile.report.script import SCRIPT
from effcompile.report.style import STYLE


def document(title: str, sections: Iterable[str]) -> str:
    """A page of its own."""
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light '
        f'dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of a page, under its title."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of already escaped cells; a header that starts with # is a column of numbers."""
    kinds = [' class="n"' if header.startswith("#") else "" for header in headers]
    head = "".join(
        f"<th{kind}>{escape(header.lstrip('#'))}</th>" for header, kind in zip(headers, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for cell, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
