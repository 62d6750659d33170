"""Print a sparse training run: its layers, what it costs, whether it pays here, and the dense model of equal
FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from effcompile.core.units import format_count, format_seconds
from effcompile.ir.sparsity import LayerFigures, SparsityFigures
from effcompile.report.figures import NONE
from effcompile.report.names import collapse, printed
from effcompile.report.page import DIM, GOOD, STRONG, WARN, Column, Page, Row


def print_sparsity(figures: SparsityFigures, console: Console | None = None) -> None:
    """Print the figures to the console (default: stdout); nothing is computed beyond ratios of them."""
    page = Page(console)
    moving = f"{figures.growth} growth" if figures.updates else "static"
    what = (
        f" · sparsity {figures.sparsity:g} of {figures.model} · blocks of {figures.block} × "
        f"{figures.block} · {moving}"
    )
    page.line(
        Text(" "),
        Text("effcompile", style=STRONG),
        Text(page.cut(page.text(what).plain, page.width - len(" effcompile"))),
    )
    page.field("pattern", _pattern(figures))
    page.field("weights", _weights(figures))
    _layers(page, figures.layers)
    page.blank()
    _flops(page, figures)
    _efficiency(page, figures)


def _pattern(figures: SparsityFigures) -> str:
    if not figures.updates:
        return f"step {figures.step} · static · {figures.distribution}"
    due = f"next at step {figures.next_update}" if figures.next_update else "no more due"
    return (
        f"step {figures.step} · {figures.updates_done} of {figures.updates} updates, {due} · "
        f"{figures.distribution}"
    )


def _weights(figures: SparsityFigures) -> str:
    if not figures.layers:
        return f"no layer is sparse; {format_count(figures.other_parameters)} parameters dense"
    active = sum(layer.active for layer in figures.layers) * figures.block**2
    return (
        f"{format_count(active)} active, density {figures.density:.1%} · {figures.explored:.1%} of all "
        f"blocks explored · {format_count(figures.other_parameters)} other parameters dense"
    )


def _layers(page: Page, layers: Sequence[LayerFigures]) -> None:
    """One row per set of layers of equal shape and execution, their names below."""
    if not layers:
        return
    columns = [Column(header="weight", style=STRONG)]
    columns += [Column(header=name, right=True) for name in ("layers", "density", "explored", "empty rows")]
    page.blank()
    page.table([*columns, Column(header="run as")], [_row(group) for group in _alike(layers)])


def _alike(layers: Sequence[LayerFigures]) -> Iterator[list[LayerFigures]]:
    def form(layer: LayerFigures) -> tuple[int, int, str]:
        return (layer.out_features, layer.in_features, layer.execution)

    for _, group in groupby(sorted(layers, key=form), key=form):
        yield list(group)


def _row(group: Sequence[LayerFigures]) -> Row:
    first, blocks = group[0], sum(layer.blocks for layer in group)
    active, explored = (sum(getattr(layer, figure) for layer in group) for figure in ("active", "explored"))
    shape = f"{first.out_features} × {first.in_features}"
    empty = str(sum(layer.empty_rows for layer in group))
    cells = [
        shape,
        str(len(group)),
        f"{active / blocks:.1%}",
        f"{explored / blocks:.1%}",
        empty,
        first.execution,
    ]
    return Row(cells=cells, below=printed(collapse(layer.name for layer in group)))


def _flops(page: Page, figures: SparsityFigures) -> None:
    flops = figures.flops
    note = "" if flops.of == "step" else "; linear layers only: measure(loss) counts a step"
    page.field(
        "FLOPs",
        f"{format_count(flops.sparse)} per {flops.of} against {format_count(flops.dense)} dense{note}",
    )
    width, depth = flops.matched_width(), flops.matched_depth()
    ways = [
        f"width × {width:.2f}"
        + (f" ({figures.width} → {round(figures.width * width)})" if figures.width else "")
    ]
    if depth is not None:
        ways.append(
            f"depth × {depth:.2f}"
            + (f" ({figures.depth} → {figures.depth * depth:.1f})" if figures.depth else "")
        )
    page.field(
        "matched", f"the dense model of equal FLOPs has {' or '.join(ways)}: its loss is the one to beat"
    )


def _efficiency(page: Page, figures: SparsityFigures) -> None:
    found = figures.efficiency
    if found is None:
        page.field(
            "eps",
            Text(f"{NONE} not measured: measure(loss) times the sparse layers against dense ones", style=DIM),
        )
        return
    times = f"{format_seconds(found.sparse_seconds)} against {format_seconds(found.dense_seconds)} dense"
    page.field("eps", f"{found.eps:.2f} = time per sparse FLOP / time per dense FLOP, measured: {times}")
    gain = found.eps < found.break_even
    verdict = f"{found.dense_seconds / found.sparse_seconds:.2f}× faster here" if gain else "no gain here"
    page.field("", _judged(f"below {found.break_even:.2f} it beats the same layers dense: {verdict}", gain))
    matched = figures.matched_break_even
    if matched is None:
        text = (
            f"no limit is known for beating the matched model at {figures.sparsity:g} in blocks of "
            f"{figures.block}"
        )
        page.field("", Text(text, style=DIM))
        return
    limit, published = matched
    origin = (
        "published, BERT-Base"
        if published
        else "not published: interpolated by us between published BERT-Base losses"
    )
    verdict = "a gain here" if found.eps < limit else "no gain here"
    page.field(
        "",
        _judged(
            f"below {limit:.1f} it beats the matched model to equal loss ({origin}): {verdict}",
            found.eps < limit,
        ),
    )


def _judged(text: str, good: bool) -> Text:
    return Text(text, style=GOOD if good else WARN)
