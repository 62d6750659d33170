"""Charts of block characters for terminals: memory over a training step, and a frontier of memory against
time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report.page import BAD, DIM, STRONG

Run = tuple[str, str]  # characters and their style
Line = list[Run]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SIDE = " ▏▎▍▌▋▊▉█"
_BAND, _FILL = "blue", "cyan"
_LABEL = 11  # columns of an axis label
_ROWS = 9
_FAR = 1.6  # a budget further above the peak than this is told, not drawn
_PLOT_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One point of a frontier plot: `ours` are joined by what each budget buys; others have a name and a
    letter.
    """

    name: str
    peak_bytes: float
    seconds: float
    mark: str = "●"

    @property
    def ours(self) -> bool:
        return self.mark == "●"


def resample(values: Sequence[int], columns: int) -> list[int]:
    """The values over that many columns, each the maximum of what falls there: no peak is lost."""
    count = len(values)
    bounds = [i * count // columns for i in range(columns + 1)]
    return [max(values[lo : max(hi, lo + 1)]) for lo, hi in itertools.pairwise(bounds)]


def far(timeline: MemoryTimeline, limit: int | None) -> bool:
    """Whether a budget is too far above the peak to be drawn with it."""
    return limit is not None and limit > _FAR * timeline.peak_bytes


def memory_chart(timeline: MemoryTimeline, limit: int | None, width: int) -> list[Line]:
    """Bytes live over the step, `width` columns wide: budget, divider of forward and backward, band of
    parameters, peak.
    """
    columns, divider = _columns(timeline, width - _LABEL - 1)
    drawn = None if far(timeline, limit) else limit
    top = max(timeline.peak_bytes, drawn or 0, 1)
    unit = top / _ROWS
    lines = [[_cell(value, row, unit, timeline.parameter_bytes) for value in columns] for row in range(_ROWS)]
    lines.append([(" ", "")] * len(columns))
    at = _peak_column(columns, timeline.peak_phase == "forward", divider)
    labels = {_ROWS: top} | {
        number: top * (number + 1) / _ROWS for number in (_ROWS // 3 - 1, 2 * _ROWS // 3 - 1)
    }
    budget = -1
    if drawn is not None:
        budget = min(int(drawn / unit + 1e-9), _ROWS)
        labels[budget] = drawn
        _budget_line(lines[budget])
    marked = next((row for row in lines if row[at][0] in " ┄"), lines[-1])
    marked[at] = ("▼", BAD)
    if divider is not None:
        for row in lines:
            row.insert(divider, ("│", DIM))
    _name_band(lines, timeline.parameter_bytes, unit)
    axes = [
        _axis(bytes_like(labels[n], top) if n in labels else "", BAD if n == budget else DIM)
        for n in range(_ROWS + 1)
    ]
    return [*([*axes[n], *lines[n]] for n in reversed(range(_ROWS + 1))), _phases(len(lines[0]), divider)]


def bytes_like(size: float, largest: float) -> str:
    """Bytes in the unit that the largest label of an axis has."""
    unit = format_bytes(largest).split()[1]
    power = ("B", "KiB", "MiB", "GiB").index(unit)
    return f"{size / 1024**power:.{2 if unit == 'GiB' else 1 if unit == 'MiB' else 0}f} {unit}"


def _columns(timeline: MemoryTimeline, room: int) -> tuple[list[int], int | None]:
    """One value per column; and before which column forward and backward are divided (one column is left for
    that).
    """
    count, forward = len(timeline.points), timeline.forward_points
    if not 0 < forward < count:
        return resample(timeline.points, room), None
    left = min(max(round((room - 1) * forward / count), 1), room - 2)
    return [
        *resample(timeline.points[:forward], left),
        *resample(timeline.points[forward:], room - 1 - left),
    ], left


def _cell(value: int, row: int, unit: float, parameters: int) -> Run:
    """One character of the area: parameters as a band, what comes on top in eighths, rounded up."""
    eighths = min(max(math.ceil((value / unit - row) * 8 - 1e-6), 0), 8)
    band = eighths == 8 and (row + 0.5) * unit < parameters
    return ("░", _BAND) if band else (_EIGHTHS[eighths], _FILL)


def _budget_line(row: Line) -> None:
    """A dotted line behind the area, with its name where the area leaves room."""
    for place, (character, _) in enumerate(row):
        if character == " ":
            row[place] = ("┄", BAD)
    name = " budget "
    for start in range(2, len(row) - len(name) - 2):
        if all(character == "┄" for character, _ in row[start - 2 : start + len(name) + 2]):
            row[start : start + len(name)] = [(character, BAD) for character in name]
            return


def _peak_column(columns: Sequence[int], forward: bool, divider: int | None) -> int:
    """The highest column, in the phase that the timeline names where both phases reach it."""
    highest = max(columns)
    places = [place for place, value in enumerate(columns) if value == highest]
    named = [place for place in places if divider is None or (place < divider) == forward]
    return (named or places)[0]


def _name_band(lines: list[Line], parameters: int, unit: float) -> None:
    """`parameters, buffers, inputs 474.7 MiB` within their band, or a shorter name, where there is room."""
    rows = int(parameters / unit + 0.5)
    row = lines[max(rows - 1, 0) // 2]
    for name in (
        f" parameters, buffers, inputs {format_bytes(parameters)} ",
        f" parameters {format_bytes(parameters)} ",
    ):
        for start in range(2, len(row) - len(name) - 1):
            if rows > 0 and all(character == "░" for character, _ in row[start - 2 : start + len(name) + 2]):
                row[start : start + len(name)] = [(character, "") for character in name]
                return


def _axis(label: str, style: str = DIM) -> Line:
    return [(label.rjust(_LABEL - 1) + " ", style), ("┤" if label else "│", DIM)]


def _phases(width: int, divider: int | None) -> Line:
    """The bottom axis with the names of the phases."""
    if divider is None:
        return [*_axis("0 B")[:1], ("└" + "─" * width, DIM)]
    left, right = " forward ".center(divider, "─"), " backward ".center(width - divider - 1, "─")
    left = left if len(left) == divider else "─" * divider
    right = right if len(right) == width - divider - 1 else "─" * (width - divider - 1)
    return [*_axis("0 B")[:1], (f"└{left}┴{right}", DIM)]


def bar(part: float, columns: int) -> str:
    """A horizontal bar of `part` (0 to 1) of that many columns, in eighths."""
    eighths = min(max(round(part * columns * 8), 1 if part > 0 else 0), columns * 8)
    return "█" * (eighths // 8) + (_SIDE[eighths % 8] if eighths % 8 else "")


def dots_of(plans: Sequence[Plan], others: Sequence[tuple[str, float, float]] = ()) -> list[Dot]:
    """The plans' predicted points that have both figures, least memory first; then the named others."""
    ours = [Dot(name="", peak_bytes=p.predicted.peak_bytes, seconds=p.predicted.seconds) for p in plans
            if p.predicted.peak_bytes is not None and p.predicted.seconds is not None]  # fmt: skip
    ours.sort(key=lambda dot: (dot.peak_bytes, dot.seconds))
    theirs = (
        Dot(name=name, peak_bytes=peak, seconds=seconds, mark=letter(n))
        for n, (name, peak, seconds) in enumerate(others)
    )
    return [*ours, *theirs]


def letter(number: int) -> str:
    """The mark of the n-th other point."""
    return chr(ord("A") + number % 26)


def frontier_chart(dots: Sequence[Dot], width: int) -> list[Line]:
    """Memory to the right, time upwards: ours as ● with a line for what the budgets between buy, others as
    letters.
    """
    room = width - _LABEL - 2
    (low, high), (least, most) = span([d.peak_bytes for d in dots]), span([d.seconds for d in dots])
    grid: list[Line] = [[(" ", "")] * (room + 1) for _ in range(_PLOT_ROWS)]

    def place(dot: Dot) -> tuple[int, int]:
        return round((dot.peak_bytes - low) / (high - low) * room), round(
            (dot.seconds - least) / (most - least) * (_PLOT_ROWS - 1)
        )

    ours = [place(dot) for dot in dots if dot.ours]
    for (x, y), following in zip(ours, [*(x for x, _ in ours[1:]), room + 1], strict=True):
        for column in range(x, following):
            grid[y][column] = ("·", DIM)
    for dot in dots:
        x, y = place(dot)
        grid[y][x] = (dot.mark, _FILL if dot.ours else STRONG)
    labels = {
        0: least,
        _PLOT_ROWS // 2: least + (most - least) * (_PLOT_ROWS // 2) / (_PLOT_ROWS - 1),
        _PLOT_ROWS - 1: most,
    }
    lines = [
        [*_axis(format_seconds(labels[y]) if y in labels else ""), *grid[y]]
        for y in reversed(range(_PLOT_ROWS))
    ]
    left, middle, right = (bytes_like(low + (high - low) * part, high) for part in (0, 0.5, 1))
    inner = middle.center(room + 1 - len(left) - len(right))
    return [
        *lines,
        [(" " * _LABEL, ""), ("└" + "─" * (room + 1), DIM)],
        [(" " * (_LABEL + 1), ""), (left + inner + right, DIM)],
    ]


def span(values: Sequence[float]) -> tuple[float, float]:
    """Least and most, a little apart where they are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low * 0.99 - 1e-9, high * 1.01 + 1e-9)
