"""A printed page: fields and tables laid out for the console's width, in ASCII where the encoding has nothing
else.

Lines are laid out here, not by rich, because names must lose their middle and never wrap; rich gives colour,
the width and the rules about terminals (NO_COLOR, pipes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

GOOD, BAD, WARN, DIM, STRONG, LABEL = "green", "bold red", "yellow", "dim", "bold", "cyan"
WIDE = 128  # from this width on, sites get a column of their own
_WIDEST = 160
_NARROWEST = 40
_GAP = 2
_LEAST = 12  # a column that gives way keeps this much
_LABEL_WIDTH = 10

_ASCII = str.maketrans(
    {
        "·": "-",
        "→": "->",
        "…": "~",
        "–": "-",
        "—": "-",
        "−": "-",
        "×": "x",
        "÷": "/",
        "≤": "<=",
        "≥": ">=",
        "✔": "+",
        "✘": "!",
    }
    | {"●": "*", "◌": "?", "─": "-", "│": "|", "µ": "u", "²": "2", "•": "*", "⚠": "!", "▸": ">", "±": "+-"}
    | {"▒": "f", "▓": "w"}
    | {"‖": "||", "δ": "d", "§": "sec. "}
    | dict(zip("┄┤└┴▼░▁▂▃▄▅▆▇█", "-|++v:__--==##", strict=True))
    | dict(zip("▏▎▍▌▋▊▉", "--=====", strict=True))
)
# figure and unit, and a separator, stay on a line
_GLUE = re.compile(r"(?<=\d) (?=(?:s|ms|µs|us|B|[KMGT]i?B|[kMGT])\b|%)| (?=· |- )")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_CONTROL_WITHIN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]+")

Cell = str | Text


def printable(text: str) -> str:
    """Lines without what a terminal would obey: names and files of others may hold any character."""
    return _CONTROL_WITHIN_LINES.sub(" ", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A table column.

    `group` is written above adjacent columns that share it. Where the page is too narrow, a "cut" column
    loses the middle of its texts and a "wrap" column breaks lines between words; "rigid" columns keep their
    width.
    """

    header: str = ""
    group: str = ""
    right: bool = False
    fit: Literal["rigid", "cut", "wrap"] = "rigid"
    style: str = ""


@dataclass(slots=True, kw_only=True)
class Row:
    """Cells of one row; the first cell spans the first `span` columns.

    `below`: lines under it, indented, cut in the middle.
    """

    cells: Sequence[Cell]
    below: Sequence[Cell] = field(default_factory=list)
    span: int = 1


class Page:
    """Writes to a console, line by line."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.width = max(_NARROWEST, min(self.console.width, _WIDEST))
        self.ascii = not self.console.encoding.lower().startswith("utf")

    @property
    def wide(self) -> bool:
        return self.width >= WIDE

    def text(self, cell: Cell, style: str = "") -> Text:
        """A cell as printable text: control characters out, ASCII where needed.

        Markup is never interpreted.
        """
        plain = _CONTROL.sub(" ", cell.plain if isinstance(cell, Text) else cell)
        if self.ascii:
            plain = plain.translate(_ASCII).encode("ascii", "replace").decode()
        return Text(plain, style=(str(cell.style) if isinstance(cell, Text) and cell.style else style))

    def line(self, *parts: Text) -> None:
        """One line, as it is."""
        joined = Text.assemble(*parts)
        joined.rstrip()
        self.console.print(joined, soft_wrap=True, highlight=False)

    def blank(self) -> None:
        self.console.print()

    def field(self, label: str, content: Cell, right: Cell = "") -> None:
        """`label   content            right`, the content wrapped under itself."""
        end = self.text(right)
        room = self.width - 1 - _LABEL_WIDTH
        first = room - (end.cell_len + 2 if end.plain else 0)
        lines = self.wrap(
            content, first if self.text(content).cell_len <= first or first >= room // 2 else room
        )
        for number, line in enumerate(lines):
            head = self.text(label if number == 0 else "", LABEL)
            tail = [Text(" " * (first - line.cell_len + 2)), end] if number == 0 and end.plain else []
            self.line(Text(" "), _pad(head, _LABEL_WIDTH), line, *tail)

    def fields(self, label: str, contents: Iterable[Cell]) -> None:
        """Several contents under one label."""
        for number, content in enumerate(contents):
            self.field(label if number == 0 else "", content)

    def verbatim(self, label: str, content: str, note: str = "") -> None:
        """A command to copy: never cut, never wrapped by us. The note is left out where it does not fit."""
        head, body, tail = self.text(label, LABEL), self.text(content), self.text(note, DIM)
        fits = 1 + _LABEL_WIDTH + body.cell_len + 3 + tail.cell_len <= self.width
        self.line(Text(" "), _pad(head, _LABEL_WIDTH), body, *((Text("   "), tail) if note and fits else ()))

    def wrap(self, cell: Cell, width: int) -> list[Text]:
        """Lines of at most `width`, broken between words; a word that is too long loses its middle."""
        text = self.text(cell)
        lines, current = [], ""
        for word in _GLUE.sub("\0", text.plain).split(" "):
            word = self.cut(word.replace("\0", " "), width)
            if current and cell_len(current) + 1 + cell_len(word) > width:
                lines.append(current)
                current = word
            else:
                current = f"{current} {word}" if current else word
        return [Text(line, style=text.style) for line in [*lines, current]]

    def cut(self, plain: str, width: int) -> str:
        """The text with its middle replaced by … so that it fits; a final `(12)` stays whole, names lose
        whole parts.
        """
        if cell_len(plain) <= width:
            return plain
        head, count, _ = plain.rpartition(" (") if plain.endswith(")") else (plain, "", "")
        tail = plain[len(head) :] if count else ""
        room, dots = max(width - cell_len(tail), 3), "~" if self.ascii else "…"
        prose = " " in head.removeprefix("  ").removeprefix(self.text("· ").plain)
        shorter = None if prose else _cut_name(head, room, dots)
        if shorter is None:
            left = room // 2
            shorter = set_cell_size(head, left) + dots + set_cell_size(head[::-1], room - left - 1)[::-1]
        return shorter + tail

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Header and rows."""
        styles = [[column.style for column in (*columns[:1], *columns[row.span :])] for row in rows]
        texts = [
            [self.text(cell, s) for cell, s in zip(row.cells, style, strict=True)]
            for row, style in zip(rows, styles, strict=True)
        ]
        widths = self._widths(columns, rows, texts)
        if sum(widths) + _GAP * (len(widths) - 1) + 1 > self.width:
            self._records(columns, rows, texts)
            return
        for line in self._header(columns, widths):
            self.line(line)
        longest = max((self.text(below).cell_len for row in rows for below in row.below), default=0)
        indent = widths[0] + _GAP + 1 if widths[0] + _GAP + 1 + longest < self.width else 3
        for row, cells in zip(rows, texts, strict=True):
            room = sum(widths[: row.span]) + _GAP * (row.span - 1)
            for line in self._row([columns[0], *columns[row.span :]], [room, *widths[row.span :]], cells):
                self.line(line)
            for below in row.below:
                text = self.text(below, DIM)
                self.line(
                    Text(" " * indent), Text(self.cut(text.plain, self.width - indent - 1), style=text.style)
                )

    def _records(
        self, columns: Sequence[Column], rows: Sequence[Row], texts: Sequence[Sequence[Text]]
    ) -> None:
        """A table too wide for the page: each row as its first cell and a line per figure."""
        for row, (first, *cells) in zip(rows, texts, strict=True):
            if first.plain.strip():
                self.line(Text(" "), Text(self.cut(first.plain, self.width - 1), style=first.style))
            for column, cell in zip(columns[row.span :], cells, strict=True):
                title = self.text(" ".join(f"{column.group} {column.header}".split()), DIM)
                for number, line in enumerate(
                    self.wrap(cell, self.width - 26) if cell.plain.strip() not in ("", "–", "-") else []
                ):
                    self.line(
                        Text("   "),
                        _pad(Text(self.cut(title.plain if number == 0 else "", 20), style=DIM), 22),
                        line,
                    )
            for below in row.below:
                self.line(Text("     "), Text(self.cut(self.text(below).plain, self.width - 6), style=DIM))

    def _widths(
        self, columns: Sequence[Column], rows: Sequence[Row], texts: Sequence[Sequence[Text]]
    ) -> list[int]:
        widths = []
        for place, column in enumerate(columns):
            alone = column.group and sum(other.group == column.group for other in columns) == 1
            heads = [*column.header.split("\n"), f"─ {column.group} ─" if alone else ""]
            plain = [
                *(cells[place].cell_len for row, cells in zip(rows, texts, strict=True) if row.span == 1),
                *(cell_len(h) for h in heads),
            ]
            widths.append(max(plain))
        for row, cells in zip(rows, texts, strict=True):
            missing = cells[0].cell_len - sum(widths[: row.span]) - _GAP * (row.span - 1)
            if row.span > 1 and missing > 0:
                widths[next(i for i in range(row.span) if columns[i].fit == "cut" or i == row.span - 1)] += (
                    missing
                )
        excess = sum(widths) + _GAP * (len(widths) - 1) + 2 - self.width
        for fit in ("wrap", "cut"):  # give way in this order
            giving = [
                place for place, column in enumerate(columns) if column.fit == fit and widths[place] > _LEAST
            ]
            while excess > 0 and giving:  # the widest first, so that no column is a thread beside a broad one
                widest = max(giving, key=widths.__getitem__)
                widths[widest] -= 1
                excess -= 1
                giving = [place for place in giving if widths[place] > _LEAST]
        return widths

    def _header(self, columns: Sequence[Column], widths: Sequence[int]) -> Iterator[Text]:
        parts = [column.header.split("\n") for column in columns]
        depth = max([len(part) for part in parts] + [2 * any(c.group for c in columns)])
        if not any(column.header for column in columns):
            return
        for level in range(depth):
            cells: list[str] = []
            place = 0
            while place < len(columns):
                group, span = columns[place].group, 1
                if group and level == 0:
                    while place + span < len(columns) and columns[place + span].group == group:
                        span += 1
                    room = sum(widths[place : place + span]) + _GAP * (span - 1)
                    cells.append(self.text(f" {group} ".center(room, "─")).plain)
                else:
                    row = level - (depth - len(parts[place]))
                    plain = self.cut(self.text(parts[place][row]).plain if row >= 0 else "", widths[place])
                    cells.append(_pad(Text(plain), widths[place], right=columns[place].right).plain)
                place += span
            yield Text(" " + (" " * _GAP).join(cells), style=DIM)

    def _row(self, columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Text]) -> Iterator[Text]:
        lines = [
            self.wrap(cell, width)
            if column.fit == "wrap"
            else [Text(self.cut(cell.plain, width), style=cell.style)]
            for column, width, cell in zip(columns, widths, cells, strict=True)
        ]
        for level in range(max(map(len, lines))):
            joined = Text(" ")
            for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
                cell = lines[place][level] if level < len(lines[place]) else Text()
                joined.append_text(_pad(cell, width, right=column.right))
                joined.append(" " * _GAP if place + 1 < len(columns) else "")
            yield joined


def _cut_name(name: str, width: int, dots: str) -> str | None:
    """A dotted name without the fewest characters of whole middle parts, numbers kept if possible; None if it
    has too few parts.
    """
    parts = name.split(".")
    found = []
    for start in range(1, len(parts) - 1):
        for stop in range(start + 1, len(parts)):
            shorter = ".".join([*parts[:start], dots, *parts[stop:]])
            if cell_len(shorter) <= width:
                numbers = any(any(map(str.isdigit, part)) for part in parts[start:stop])
                found.append((numbers, -len(shorter), abs(start + stop - len(parts)), shorter))
    return min(found)[-1] if found else None


def _pad(text: Text, width: int, *, right: bool = False) -> Text:
    """The text filled with spaces to a width."""
    space = Text(" " * max(width - text.cell_len, 0))
    return Text.assemble(space, text) if right else Text.assemble(text, space)
