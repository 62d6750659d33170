"""The sections of the HTML report of a plan for many devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.distributed import Distributed
from effcompile.ir.strategy import AXES
from effcompile.report.devices import VERDICTS, launch_lines, mesh_text, strategy_text

_COLOURS = {"F": "var(--c0)", "B": "var(--c1)", "W": "var(--c2)"}
_MOST_RANKS, _HIGH = 1024, 22


def devices_sections(d: Distributed, head: str) -> Iterator[str]:
    """Verdict, mesh, time line, memory, ledgers, seconds, runners-up, launch lines."""
    yield head
    yield _verdict(d)
    yield _mesh(d)
    yield _section("One step over the stages", _time_line(d))
    yield _section(f"Memory over the step of rank {d.rank}", _memory(d))
    yield _section("Ledger of a rank at its highest instant", _ledger(d))
    spent = [(name, format_seconds(s), f"{s / d.seconds:.1%}") for name, s in d.spent.items()]
    yield _section("Seconds of the slowest rank", _table(["", "seconds", "share"], spent))
    others = [
        (
            mesh_text(r.strategy),
            format_seconds(r.seconds),
            f"{r.seconds / d.seconds - 1:+.1%}",
            format_bytes(r.peak_bytes),
        )
        for r in d.runners_up
    ]
    yield _section("Runners-up", _table(["", "step", "more", "peak"], others))
    dropped = [(reason, f"{count:,}") for reason, count in d.dropped.items()]
    yield _section("Dropped", _table(["why", "strategies"], dropped))
    yield _section("Launch", "".join(f"<pre>{escape(line)}</pre>" for line in launch_lines(d)))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _table(names: list[str], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return (
        '<div class="scroll"><table '
        f'class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _verdict(d: Distributed) -> str:
    word, style = VERDICTS[d.verdict]
    badge = {"green": "good", "yellow": "warn"}.get(style, "bad")
    interval = (
        f"{format_bytes(d.peak_bytes)} ({format_bytes(d.low_bytes)} to "
        f"{format_bytes(d.high_bytes)} of {format_bytes(d.limit_bytes)})"
    )
    lines = [
        f"{format_seconds(d.seconds)} a step · {d.tokens_per_second:,.0f} tokens/s/device · MFU {d.mfu:.0%}",
        f"the fullest is rank {d.rank}, at its highest instant: {d.instant}",
        *([f"{d.fewest} devices would be enough"] if d.fewest is not None else []),
        *d.nearest,
    ]
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    what = (
        f'<span class="what">{escape(mesh_text(d.strategy))}</span><span class="badge {badge}">{word}: '
        f"{interval}</span>"
    )
    return (
        f'<div class="goal">{what}</div><section>{said}<pre>--strategy '
        f'"{escape(strategy_text(d.strategy))}"</pre></section>'
    )


def _mesh(d: Distributed) -> str:
    """Nodes as rows, devices as cells, coloured by their stage."""
    used = [axis for axis in reversed(AXES) if d.strategy.size(axis) > 1]
    if not used:
        return ""
    rows = []
    for first in range(0, min(len(d.ranks), _MOST_RANKS), d.per_node):
        cells = "".join(
            '<td style="border-left:4px solid '
            f'var(--c{rank.pp % 7})">{" ".join(f"{axis[0]}{getattr(rank, axis)}" for axis in used)}</td>'
            for rank in d.ranks[first : first + d.per_node]
        )
        rows.append(f"<tr><th>node {first // d.per_node}</th>{cells}</tr>")
    more = (
        f"<p class='dim'>… {len(d.ranks) - _MOST_RANKS} devices more</p>"
        if len(d.ranks) > _MOST_RANKS
        else ""
    )
    return _section("Mesh", f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>{more}')


def _time_line(d: Distributed) -> str:
    """One bar a stage: runs of what it does."""
    width = 640
    parts = []
    for row, stage in enumerate(d.stages):
        unit = width / max(len(stage.line), 1)
        cells = "".join(
            f'<rect x="{80 + i * unit:.1f}" y="{row * _HIGH}" width="{unit:.1f}" height="{_HIGH - 4}" '
            f'fill="{_COLOURS[letter]}"/>'
            for i, letter in enumerate(stage.line)
            if letter in _COLOURS
        )
        parts.append(f'<text class="label" x="0" y="{row * _HIGH + 9}">stage {stage.stage}</text>{cells}')
    legend = "<i style='background:var(--c0)'></i>forward <i style='background:var(--c1)'></i>backward"
    figure = f'<svg viewBox="0 0 {width + 80} {_HIGH * len(d.stages)}" role="img">{"".join(parts)}</svg>'
    return (
        f"<figure>{figure}</figure><div "
        f"class='legend'><span>{legend}</span><span>{format_seconds(d.seconds)}</span></div>"
    )


def _memory(d: Distributed) -> str:
    if not d.memory:
        return ""
    top, width, height = max(d.memory), 640, 120
    points = " ".join(
        f"{i * width / max(len(d.memory) - 1, 1):.1f},{height - size / top * height:.1f}"
        for i, size in enumerate(d.memory)
    )
    line = (
        f'<polyline points="0,{height} {points} {width},{height}" fill="var(--c0)" fill-opacity=".3" '
        'stroke="var(--c0)"/>'
    )
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img">{line}</svg></figure><p '
        f'class="dim">{format_bytes(top)} at the most</p>'
    )


def _ledger(d: Distributed) -> str:
    names = list(dict.fromkeys(name for stage in d.stages for name in stage.parts))
    rows = [(name, *(format_bytes(stage.parts.get(name, 0)) for stage in d.stages)) for name in names]
    rows.append(("peak", *(format_bytes(stage.peak_bytes) for stage in d.stages)))
    return _table(["", *(f"stage {stage.stage}" for stage in d.stages)], rows)
