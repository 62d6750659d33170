"""Small inline SVG charts: stacked bars whose colours come from the page's CSS variables, so that they follow
light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = 7  # --c0 … --c6 in the style sheet; --rest is neutral
_ROW, _BAR, _LABEL, _VALUE = 34, 20, 84, 96
#: Of the drawing, by the class that the style sheet shows it in: on a phone, the wide one has text of 6 px.
_WIDTHS = {"wide": 720, "narrow": 340}


@dataclass(frozen=True, slots=True, kw_only=True)
class SvgPart:
    """One segment: its name in the legend, its length, its value as text; `colour` None is neutral."""

    name: str
    length: float
    text: str
    colour: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stacked bar with its label at the left and its total as text at the right."""

    label: str
    total: str
    parts: tuple[SvgPart, ...]


def stacked_bars(bars: Sequence[Bar], *, title: str, limit: tuple[float, str] | None = None) -> str:
    """An SVG of the bars on one scale for each width, and a legend. `limit` draws a line at a length."""
    longest = max(
        [sum(p.length for p in bar.parts) for bar in bars] + ([limit[0]] if limit else []), default=0.0
    )
    if longest <= 0:
        return ""
    drawn = "".join(_drawn(bars, title, limit, longest, kind) for kind in _WIDTHS)
    return f"<figure>{drawn}{_legend(bars)}</figure>"


def _drawn(
    bars: Sequence[Bar], title: str, limit: tuple[float, str] | None, longest: float, kind: str
) -> str:
    scale = (_WIDTHS[kind] - _LABEL - _VALUE) / longest
    top = 16 if limit else 0
    height = top + _ROW * len(bars)
    body = [_bar(bar, top + _ROW * row, scale) for row, bar in enumerate(bars)]
    if limit:
        x = _LABEL + limit[0] * scale
        side, anchor = (-5, "end") if x > _WIDTHS[kind] / 2 else (5, "start")
        body.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{height - 6}"/>')
        body.append(
            f'<text class="limit" x="{x + side:.1f}" y="{top - 6}" '
            f'text-anchor="{anchor}">{escape(limit[1])}</text>'
        )
    label = escape(title + ": " + "; ".join(f"{bar.label} {bar.total}" for bar in bars))
    box = f'class="{kind}" viewBox="0 0 {_WIDTHS[kind]} {height}"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(body)}</svg>'


def _bar(bar: Bar, y: float, scale: float) -> str:
    x = float(_LABEL)
    middle = y + _ROW / 2
    out = [f'<text class="label" x="{_LABEL - 10}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>']
    for part in bar.parts:
        width = part.length * scale
        if width <= 0:
            continue
        shown = max(width - 1.5, 0.5)  # a hairline of background between segments
        hint = f"<title>{escape(part.name)}: {escape(part.text)}</title>"
        style = _fill(part.colour)
        out.append(
            f'<rect x="{x:.1f}" y="{middle - _BAR / 2}" width="{shown:.1f}" height="{_BAR}" rx="2" '
            f'style="fill:{style}">{hint}</rect>'
        )
        x += width
    out.append(f'<text class="value" x="{x + 8:.1f}" y="{middle}">{escape(bar.total)}</text>')
    return "".join(out)


def _legend(bars: Sequence[Bar]) -> str:
    """Names of all segments, once each; left out where every bar is one segment."""
    if all(len(bar.parts) == 1 for bar in bars):
        return ""
    names = {part.name: part.colour for bar in bars for part in bar.parts if part.length > 0}
    items = "".join(
        f'<span><i style="background:{_fill(colour)}"></i>{escape(name)}</span>'
        for name, colour in names.items()
    )
    return f'<figcaption class="legend">{items}</figcaption>'


def _fill(colour: int | None) -> str:
    return "var(--rest)" if colour is None else f"var(--c{colour % _COLOURS})"
