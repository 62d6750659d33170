"""Inline SVG plots: memory over a training step, and a frontier of memory against time.

Colours are the page's CSS variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report.chart import Dot, bytes_like, far, span

_WIDTH, _HEIGHT = 720, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 30, 34
_ROOM, _DEPTH = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def memory_plot(timeline: MemoryTimeline, limit: int | None) -> str:
    """Bytes live over the step as an area, the parameters as a band below, the budget as a line, the peak as
    a dot.
    """
    drawn = None if far(timeline, limit) else limit
    peak = timeline.peak_bytes
    top = max(peak, drawn or 0, 1)
    count = len(timeline.points)

    def y(size: float) -> float:
        return _TOP + _DEPTH * (1 - size / top)

    def x(place: float) -> float:
        return _LEFT + _ROOM * place / count

    steps = "".join(f"V{y(size):.1f}H{x(place + 1):.1f}" for place, size in enumerate(timeline.points))
    base = y(0)
    band = y(min(timeline.parameter_bytes, top))
    at = timeline.points.index(peak)
    body = [
        f'<path d="M{x(0):.1f} {base:.1f}{steps}V{base:.1f}Z" style="fill:var(--c5)"/>',
        f'<rect x="{_LEFT}" y="{band:.1f}" width="{_ROOM}" height="{base - band:.1f}" '
        'style="fill:var(--c0)"/>',
        _text(
            _LEFT + 8,
            min(band + 14, base - 8),
            f"parameters, buffers, inputs {format_bytes(timeline.parameter_bytes)}",
            "over",
        ),
        *(
            _text(_LEFT - 10, y(part * top), bytes_like(part * top, top) if part else "0 B", "label", "end")
            for part in (0, 0.5, 1)
        ),
        *_divider(timeline),
    ]
    if drawn is not None:
        body.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_LEFT + _ROOM}" y1="{y(drawn):.1f}" y2="{y(drawn):.1f}"/>'
        )
        body.append(_text(_LEFT + 4, y(drawn) - 10, f"budget {format_bytes(drawn)}", "limit"))
    body.append(
        _dot(
            x(at + 0.5),
            y(peak),
            "--bad",
            f"peak {format_bytes(peak)} at {timeline.peak_site} {timeline.peak_node}",
        )
    )
    right = at > 0.6 * count
    side, anchor = (-8, "end") if right else (8, "start")
    body.append(
        _text(x(at + 0.5) + side, max(y(peak) - 10, 9), f"peak {format_bytes(peak)}", "label", anchor)
    )
    label = (
        f"memory over the step: peak {format_bytes(peak)} in the {timeline.peak_phase} at "
        f"{timeline.peak_site}"
    )
    return _figure(body, label, "" if drawn == limit else f"budget {format_bytes(limit or 0)}, far above")


def _divider(timeline: MemoryTimeline) -> list[str]:
    """A line between forward and backward, and their names below the axis."""
    count, forward = len(timeline.points), timeline.forward_points
    below = _TOP + _DEPTH + 18
    middle = _LEFT + _ROOM * forward / count
    if not 0 < forward < count:
        return []
    return [
        f'<line class="divider" x1="{middle:.1f}" x2="{middle:.1f}" y1="{_TOP}" y2="{below}"/>',
        _text((_LEFT + middle) / 2, below, "forward", "label", "middle"),
        _text((middle + _LEFT + _ROOM) / 2, below, "backward", "label", "middle"),
    ]


def frontier_plot(dots: Sequence[Dot]) -> str:
    """Memory to the right, time upwards; our points joined by what the budgets between buy, others with their
    letter.
    """
    if len(dots) < 2:
        return ""
    (low, high), (least, most) = span([d.peak_bytes for d in dots]), span([d.seconds for d in dots])

    def at(peak_bytes: float, seconds: float) -> tuple[float, float]:
        right, up = (peak_bytes - low) / (high - low), (seconds - least) / (most - least)
        return _LEFT + 12 + (_ROOM - 24) * right, _TOP + _DEPTH * (1 - up)

    body = []
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        size, seconds = low + (high - low) * part, least + (most - least) * part
        x, y = at(size, seconds)
        body.append(_text(_LEFT - 10, y, format_seconds(seconds), "label", "end"))
        body.append(_text(x, _TOP + _DEPTH + 22, bytes_like(size, high), "label", anchor))
    ours = [at(dot.peak_bytes, dot.seconds) for dot in dots if dot.ours]
    if ours:
        path = (
            f"M{ours[0][0]:.1f} {ours[0][1]:.1f}"
            + "".join(f"H{x:.1f}V{y:.1f}" for x, y in ours[1:])
            + f"H{_LEFT + _ROOM}"
        )
        body.append(f'<path d="{path}" style="fill:none;stroke:var(--c0);stroke-width:1.5"/>')
    for dot in dots:
        x, y = at(dot.peak_bytes, dot.seconds)
        hint = f"{dot.name or 'plan'}: {format_bytes(dot.peak_bytes)}, {format_seconds(dot.seconds)}"
        body.append(_dot(x, y, "--c0" if dot.ours else "--c1", hint))
        body += [] if dot.ours else [_text(x + 8, y - 8, dot.mark, "value")]
    names = "".join(f" · {dot.mark} {dot.name}, measured" for dot in dots if not dot.ours)
    return _figure(body, "time against peak memory", f"● plans, predicted{names}")


def _figure(body: Sequence[str], label: str, caption: str) -> str:
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )
    below = f'<figcaption class="legend">{escape(caption)}</figcaption>' if caption else ""
    return f"<figure>{svg}{below}</figure>"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, colour: str, hint: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" '
        f'style="fill:var({colour})"><title>{escape(hint)}</title></circle>'
    )
