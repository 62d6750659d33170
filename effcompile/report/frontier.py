"""Print plans along a front: memory against time as a plot, then one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.report import figures as f
from effcompile.report.chart import dots_of, frontier_chart, letter
from effcompile.report.page import DIM, STRONG, Column, Page, Row

Other = tuple[str, float, float]  # name, peak bytes, seconds: what was measured of another tool

TITLES = ("budget", "peak memory", "time per step", "extra")


def print_frontier(
    plans: Sequence[Plan], console: Console | None = None, *, others: Sequence[Other] = ()
) -> None:
    """A plot of peak memory against time, and one row per plan in the order given.

    Args:
        plans: predicted plans, of one model and mode.
        console: gives width, colour and encoding.
        others: measured points to draw beside ours: (name, peak bytes, seconds).
    """
    page = Page(console)
    for line in page.wrap(Text(title(plans), style=STRONG), page.width - 1):
        page.line(Text(" "), line)
    page.blank()
    dots = dots_of(plans, others)
    if len(dots) > 1:
        for line in page.wrap(Text(_legend(others), style=DIM), page.width - 1):
            page.line(Text(" "), line)
        for drawn in frontier_chart(dots, page.width - 1):
            page.line(*(page.text(text, style) for text, style in drawn))
        page.blank()
    if plans and plans[0].goal.mode == "training":
        columns = [Column(header=name, right=True) for name in TITLES]
        rows = [Row(cells=["", *training_row(plan), "predicted"]) for plan in plans]
        rows += [_other_row(plans, other, letter(number)) for number, other in enumerate(others)]
        page.table([Column(), *columns, Column(style=DIM, fit="wrap")], rows)
    else:
        columns = [Column(header=name, right=True) for name in ("peak memory", "weights", "time", "error")]
        page.table(
            [*columns, Column(header="changed", style=DIM)],
            [Row(cells=inference_row(plan)) for plan in plans],
        )


def print_side_by_side(made: Mapping[str, Plan | str], console: Console | None = None) -> None:
    """Plans of one model for several machines: a row each; a text stands for a plan that cannot be."""
    page = Page(console)
    plans = [plan for plan in made.values() if isinstance(plan, Plan)]
    if plans:
        page.line(
            Text(" "),
            page.text(f"{plans[0].model} · {plans[0].goal.mode}: {plans[0].goal.describe()}", STRONG),
        )
        page.blank()
    headers = ("time", "against\nstock", "peak memory", "fits")
    rows = [
        Row(cells=[name, *_machine_row(plan), "predicted"])
        for name, plan in made.items()
        if isinstance(plan, Plan)
    ]
    rows += [
        Row(cells=[name, *[f.NONE] * len(headers), reason])
        for name, reason in made.items()
        if isinstance(reason, str)
    ]
    page.table(
        [
            Column(header="target"),
            *(Column(header=name, right=True) for name in headers),
            Column(style=DIM, fit="wrap"),
        ],
        rows,
    )
    page.blank()
    page.verbatim("next", f"effcompile plan MODEL --target {next(iter(made))}", "shows one in full")


def _machine_row(plan: Plan) -> list[str]:
    time = f.NONE if plan.predicted.seconds is None else format_seconds(plan.predicted.seconds)
    peak = f.NONE if plan.predicted.peak_bytes is None else format_bytes(plan.predicted.peak_bytes)
    fits = f.NONE if plan.fit is None else plan.fit.verdict.lower()
    return [time, f.format_ratio(f.ratio(plan.predicted.seconds, plan.baseline.seconds)), peak, fits]


def title(plans: Sequence[Plan]) -> str:
    """What the front is of: the model, where, and the goal but for its memory."""
    if not plans:
        return "no plans"
    goal = plans[0].goal
    what = "least time for every budget" if goal.mode == "training" else goal.describe()
    return f"{plans[0].model} · {goal.mode} · {plans[0].backend}: {what}"


def training_row(plan: Plan) -> list[str]:
    """Budget, and predicted peak, time per step and extra time."""
    budget = f.NONE if plan.goal.memory is None else format_bytes(plan.goal.memory)
    time, extra, peak, _ = (measure.text(measure.after[0]) for measure in f.measures(plan))
    return [budget, peak, time, extra]


def inference_row(plan: Plan) -> list[str]:
    """Predicted peak, weights, time and error, and how many sites changed."""
    time, weights, peak, error = (measure.text(measure.after[0]) for measure in f.measures(plan))
    changed = sum(decision.option != decision.baseline for decision in plan.decisions)
    return [peak, weights, time, error, f"{changed} of {len(plan.decisions)} sites"]


def other_row(plans: Sequence[Plan], other: Other) -> list[str]:
    """The same columns of another tool; its extra time only against an unplanned step that was
    measured, too.
    """
    _, peak, seconds = other
    before = next((p.measured_baseline.seconds for p in plans if p.measured_baseline is not None), None)
    extra = f.extra(seconds, before)
    return [
        f.NONE,
        format_bytes(peak),
        format_seconds(seconds),
        f.NONE if extra is None else f.format_extra(extra),
    ]


def _other_row(plans: Sequence[Plan], other: Other, mark: str) -> Row:
    return Row(cells=[Text(mark, style=STRONG), *other_row(plans, other), f"{other[0]}, measured"])


def _legend(others: Sequence[Other]) -> str:
    named = "".join(f" · {letter(number)} {name}" for number, (name, _, _) in enumerate(others))
    return f"time against peak memory · ● plans, predicted{named}"
