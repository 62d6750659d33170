"""Print a plan for many devices: does it fit, how the mesh is divided, who holds what, where the step's
seconds go, what else there was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.text import Text

from effcompile.core.units import format_bytes, format_count, format_seconds
from effcompile.ir.distributed import Distributed, RunnerUp, StagePlan
from effcompile.ir.plan import Plan
from effcompile.ir.strategy import AXES, Strategy
from effcompile.report import figures as f
from effcompile.report.chart import bar, resample
from effcompile.report.page import BAD, DIM, GOOD, LABEL, STRONG, WARN, Cell, Column, Page, Row
from effcompile.report.reasons import words

VERDICTS = {"fits": ("FITS", GOOD), "marginal": ("MARGINAL", WARN), "no": ("DOES NOT FIT", BAD)}
_SHADES = {"F": "▒", "B": "█", "W": "▓", " ": "·"}
_STAGE_STYLES = ("cyan", "blue", "magenta", "yellow", "green", "red")
_NODES, _STAGES, _LEDGER = 8, 8, 4
_GIB = 1 << 30
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS = 5


def strategy_text(strategy: Strategy) -> str:
    """The strategy as `--strategy` takes it."""
    parts = []
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        if field.name == "cuts":
            even = len(set(value)) < 2 or value == Strategy.layers(_without_cuts(strategy), sum(value))
            parts += [] if even else [f"cuts={'/'.join(map(str, value))}"]
        else:
            parts.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
    return ",".join(parts)


def _without_cuts(strategy: Strategy) -> Strategy:
    return Strategy.of(strategy, cuts=())


def mesh_text(strategy: Strategy) -> str:
    """The axes that are in use, in the reader's order, and what goes with them."""
    axes = (
        " × ".join(
            f"{axis} {strategy.size(axis)}" for axis in ("dp", "tp", "pp", "cp") if strategy.size(axis) > 1
        )
        or "one device"
    )
    rest = [f"ZeRO-{strategy.zero}"] if strategy.shards > 1 else []
    rest += ["sp"] if strategy.sp else []
    rest += [f"{strategy.vpp} stages a rank"] if strategy.vpp > 1 else []
    rest += [f"offload {strategy.offload}"] if strategy.offload != "none" else []
    return " · ".join([axes, *rest, f"micro-batch {strategy.micro_batch}"])


def print_devices(page: Page, plan: Plan, verbose: bool = False) -> None:
    """The whole report of such a plan."""
    d = plan.distributed
    assert d is not None, "a plan for many devices"
    _head(page, plan, d)
    _mesh(page, d)
    _time_line(page, d)
    _memory(page, d)
    _ledger(page, d)
    _spent(page, d)
    _layers(page, d, verbose)
    _others(page, d)
    if plan.notes:
        page.blank()
        page.fields("notes", list(map(words, plan.notes)))
    _launch(page, d)


def _head(page: Page, plan: Plan, d: Distributed) -> None:
    count = f"{d.devices} devices" if d.devices > 1 else "one device"
    title = f" · plan for {plan.model} ({format_count(plan.parameters)} parameters) · {count}"
    page.line(
        Text(" "), Text("effcompile", style=STRONG), Text(page.cut(page.text(title).plain, page.width - 11))
    )
    page.field("target", f"{f.target_text(plan)} · {d.nodes} × {d.per_node}")
    page.field(
        "batch",
        f"{d.global_batch} sequences of {d.sequence} tokens a step, {d.micro_batches} micro-batches on "
        "each rank",
    )
    page.blank()
    word, style = VERDICTS[d.verdict]
    interval = f"{format_bytes(d.low_bytes)} to {format_bytes(d.high_bytes)} of {format_bytes(d.limit_bytes)}"
    page.field("verdict", Text(f"{word}: {format_bytes(d.peak_bytes)} ({interval})", style=style))
    page.field("", f"the fullest is rank {d.rank}, at its highest instant: {d.instant}")
    page.field("strategy", Text(mesh_text(d.strategy), style=STRONG))
    speed = f"{d.tokens_per_second:,.0f} tokens/s/device · MFU {d.mfu:.0%}"
    page.field("step", Text(f"{format_seconds(d.seconds)} · {speed}", style=STRONG))
    page.field("proof", f"{_proof(d)} (predicted, {format_seconds(d.search_seconds)})")
    if d.fewest is not None:
        page.field(
            "fewest",
            f"{d.fewest} device{'s' * (d.fewest > 1)} would be enough"
            if d.fewest != d.devices
            else "no fewer are enough",
        )
    page.fields("nearest", d.nearest)


def _proof(d: Distributed) -> str:
    """What the search showed."""
    if d.considered == 1:
        return "the strategy is given: nothing was searched"
    if d.verdict == "no":
        return f"none of {d.considered:,} divisions fits; this one needs the least"
    gap = max(0.0, 1 - d.bound_seconds / d.seconds)
    return f"no division of {d.considered:,} is more than {gap:.1%} faster"


def _mesh(page: Page, d: Distributed) -> None:
    """Every node a row, every device a cell with where it stands on the axes that are in use."""
    used = [axis for axis in reversed(AXES) if d.strategy.size(axis) > 1]
    if not used:
        return
    page.blank()
    letters = ", ".join(f"{axis[0]} {axis}" for axis in used)
    page.line(page.text(" mesh", LABEL), page.text(f" · a row a node: {letters}", DIM))
    width = max(len("".join(f"{axis[0]}{d.strategy.size(axis) - 1}" for axis in used)), 3) + 1
    fit = max(1, (page.width - 12) // width)
    nodes = range(d.nodes) if d.nodes <= _NODES else [*range(_NODES - 2), -1, d.nodes - 1]
    for node in nodes:
        if node < 0:
            page.field("", Text(f"… {d.nodes - _NODES + 1} nodes more", style=DIM))
            continue
        cells = [page.text(f" node {node}".ljust(11), DIM)]
        first = node * d.per_node
        for rank in range(first, first + min(d.per_node, fit)):
            at = d.strategy.coordinates(rank)
            word = "".join(f"{axis[0]}{at[axis]}" for axis in used)
            cells.append(page.text(word.ljust(width), _STAGE_STYLES[at["pp"] % len(_STAGE_STYLES)]))
        page.line(*cells, page.text("…" if d.per_node > fit else "", DIM))
    page.fields("", [Text(line, style=DIM) for line in _holds(d.strategy)])


def _holds(s: Strategy) -> list[str]:
    """Who holds what, axis by axis."""
    shared = {
        0: "each holds all",
        1: "optimizer states",
        2: "states and gradients",
        3: "states, gradients and weights",
    }[s.zero]
    lines = []
    if s.pp > 1:
        lines.append(f"p: {s.pp} stages of the pipeline, {s.schedule}")
    if s.tp > 1:
        lines.append(
            f"t: 1/{s.tp} of every head and neuron" + (", and of the sequence between them" if s.sp else "")
        )
    if s.cp > 1:
        lines.append(f"c: 1/{s.cp} of every sequence")
    if s.dp > 1:
        lines.append(f"d: 1/{s.dp} of the batch")
    if s.shards > 1:
        lines.append(
            f"{'d and c' if s.dp > 1 and s.cp > 1 else 'd' if s.dp > 1 else 'c'}: {shared}"
            + (f", 1/{s.shards} each" * (s.zero > 0))
        )
    return lines


def _shown(stages: Sequence[StagePlan], most: int) -> list[StagePlan | None]:
    """The first ones and the last; None stands for those between."""
    return list(stages) if len(stages) <= most else [*stages[: most - 2], None, stages[-1]]


def _time_line(page: Page, d: Distributed) -> None:
    if len(d.stages) < 2:
        return
    page.blank()
    weights = ", ▓ of weights" if any("W" in stage.line for stage in d.stages) else ""
    page.line(page.text(" one step", LABEL), page.text(f" · ▒ forward, █ backward{weights}, · waits", DIM))
    for stage in _shown(d.stages, _STAGES):
        if stage is None:
            page.field("", Text(f"… {len(d.stages) - _STAGES + 1} stages more", style=DIM))
            continue
        drawn = "".join(_SHADES[letter] for letter in _narrowed(stage.line, page.width - 12))
        page.line(
            page.text(f" stage {stage.stage}".ljust(11), DIM),
            page.text(drawn, _STAGE_STYLES[stage.stage % len(_STAGE_STYLES)]),
        )
    room = len(_narrowed(d.stages[0].line, page.width - 12))
    page.line(Text(" " * 11), page.text("0".ljust(room - 8) + format_seconds(d.seconds).rjust(8), DIM))


def _narrowed(line: str, columns: int) -> str:
    """A stage's line in no more columns."""
    return line if len(line) <= columns else "".join(line[i * len(line) // columns] for i in range(columns))


def _memory(page: Page, d: Distributed) -> None:
    """Bytes over the step of the fullest rank, as bars of eighths."""
    if not d.memory:
        return
    page.blank()
    page.line(page.text(" memory", LABEL), page.text(f" · of rank {d.rank} over the step", DIM))
    columns = min(page.width - 12, 64)
    values = (
        resample(d.memory, columns)
        if len(d.memory) >= columns
        else [d.memory[i * len(d.memory) // columns] for i in range(columns)]
    )
    top = max(max(values), 1)
    for row in reversed(range(_ROWS)):
        filled = [value / top * _ROWS - row for value in values]
        drawn = "".join(_EIGHTHS[max(0, min(8, round(part * 8)))] for part in filled)
        label = format_bytes(top) if row == _ROWS - 1 else ""
        page.line(page.text(label.rjust(10) + " ", DIM), page.text(drawn.rstrip(), "cyan"))


def _ledger(page: Page, d: Distributed) -> None:
    """What a rank of each stage holds at its highest instant."""
    page.blank()
    page.line(page.text(" ledger", LABEL), page.text(" · GiB at the highest instant", DIM))
    shown = [stage for stage in _shown(d.stages, _LEDGER) if stage is not None]
    names = dict.fromkeys(name for stage in shown for name in stage.parts)
    several = len(d.stages) > 1
    columns = [
        Column(fit="cut"),
        *(Column(header=f"stage {s.stage}" if several else "each rank", right=True) for s in shown),
    ]
    columns += [] if several else [Column(style="cyan")]
    rows = []
    for name in names:
        cells: list[Cell] = [name, *(_gib(stage.parts.get(name, 0)) for stage in shown)]
        rows.append(
            Row(cells=cells if several else [*cells, bar(shown[0].parts[name] / shown[0].peak_bytes, 24)])
        )
    total: list[Cell] = [
        Text("peak", style=STRONG),
        *(Text(_gib(stage.peak_bytes), style=STRONG) for stage in shown),
    ]
    rows.append(Row(cells=total if several else [*total, ""]))
    if any(stage.host_bytes for stage in shown):
        host: list[Cell] = ["on the host", *(_gib(stage.host_bytes) for stage in shown)]
        rows.append(Row(cells=host if several else [*host, ""]))
    page.table(columns, rows)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}" if size else "–"


def _spent(page: Page, d: Distributed) -> None:
    page.blank()
    page.line(page.text(" seconds", LABEL), page.text(" · on the slowest rank", DIM))
    spent = {name: seconds for name, seconds in d.spent.items() if seconds > 1e-4 * d.seconds}
    columns = [Column(fit="cut"), Column(right=True, style=STRONG), Column(right=True), Column(style="cyan")]
    page.table(
        columns,
        [
            Row(cells=[name, format_seconds(s), f"{s / d.seconds:.1%}", bar(s / d.seconds, 24)])
            for name, s in spent.items()
        ],
    )


def _layers(page: Page, d: Distributed, verbose: bool) -> None:
    """What the layers of each stage keep and compute again."""
    page.blank()
    columns = [
        Column(header="stage"),
        Column(header="layers"),
        Column(header="what they do", fit="cut"),
        Column(header="kept each", right=True),
    ]
    rows = []
    for stage in d.stages if verbose else _shown(d.stages, _STAGES):
        if stage is None:
            rows.append(Row(cells=["…", "", "", ""]))
            continue
        for i, held in enumerate(stage.held):
            what = held.option + (" · weights kept gathered" if held.gathered else "")
            rows.append(
                Row(
                    cells=[
                        str(stage.stage) if not i else "",
                        f"{held.layers} of {_count(stage)}",
                        what,
                        format_bytes(held.kept_bytes),
                    ]
                )
            )
    page.table(columns, rows)


def _count(stage: StagePlan) -> int:
    return sum(end - begin for begin, end in stage.layers)


def _others(page: Page, d: Distributed) -> None:
    if d.runners_up:
        page.blank()
        columns = [
            Column(header="runners-up", fit="cut"),
            Column(header="step", right=True),
            Column(right=True),
            Column(header="peak", right=True),
        ]
        page.table(columns, [_runner_up(d, other) for other in d.runners_up])
    if d.dropped:
        page.blank()
        page.fields("dropped", [f"{count:,} strategies: {reason}" for reason, count in d.dropped.items()])


def _runner_up(d: Distributed, other: RunnerUp) -> Row:
    more = other.seconds / d.seconds - 1
    return Row(
        cells=[
            mesh_text(other.strategy),
            format_seconds(other.seconds),
            f"{more:+.1%}",
            format_bytes(other.peak_bytes),
        ]
    )


def launch_lines(d: Distributed) -> tuple[str, str]:
    """torchrun by hand on every node, and by Slurm.

    Elastic: the static rendezvous fails its first restart.
    """
    run = (
        f"torchrun --nnodes {d.nodes} --nproc-per-node {d.per_node} --max-restarts 2 --rdzv-backend "
        "c10d --rdzv-endpoint $HOST:29500"
    )
    return f"{run} train.py", f"srun --nodes {d.nodes} --ntasks-per-node 1 {run} train.py"


def _launch(page: Page, d: Distributed) -> None:
    page.blank()
    by_hand, slurm = launch_lines(d)
    page.verbatim("strategy", f'--strategy "{strategy_text(d.strategy)}"')
    page.verbatim("launch", by_hand)
    page.verbatim("slurm", slurm)
