"""Print a run: one row for each stage with its batch, its peak and what it costs, and what the whole comes to
below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from rich.console import Console
from rich.text import Text

from effcompile.core.units import format_bytes, format_count, format_seconds
from effcompile.ir.plan import Plan
from effcompile.report.page import STRONG, Column, Page, Row

#: Tokens for each parameter at which a model of a given compute learns most (Hoffmann et al. 2022, arXiv
#: 2203.15556).
CHINCHILLA = 20
HEADS = ("batch", "steps", "peak", "per step", "in all", "learning rate")
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage as it is printed.

    Attributes:
        plan: of its step. steps: how many. batch: examples of each. units: tokens of an example, 0 where it
            has none.
        seconds: of a step, predicted. peak: bytes at the highest instant, with what the stage keeps beside.
        flops: of a step, counted operator by operator; None where they could not be. parameters: of the model
            in this stage.
        rate: the learning rate that holds; None where none was given.
        spent: seconds that its steps took, of `taken` of them, in this process. over: whether it is over.
            notes: what its fields say.
    """

    name: str
    plan: Plan
    steps: int
    batch: int
    seconds: float
    peak: int | None
    rate: float | None = None
    taken: int = 0
    spent: float = 0.0
    over: bool = False
    units: int = 0
    flops: float | None = None
    parameters: int = 0
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> float:
        """Seconds of all its steps, predicted."""
        return self.steps * self.seconds

    @property
    def tokens(self) -> int:
        """Of all its steps."""
        return self.steps * self.batch * self.units


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMachine:
    """What a run's machine takes by the hour, where its target states that: `watts` at load, `price` in
    dollars.
    """

    watts: float | None = None
    price: float | None = None


def print_run(rows: Sequence[StageRow], machine: RunMachine, console: Console | None = None) -> None:
    """The stages in their order, and what they come to."""
    page = Page(console)
    page.line(Text(f" effcompile · {run_title(rows)}", style=STRONG))
    page.line(Text(f" goal      {goal_of(rows)} in every stage"))
    page.blank()
    columns = [Column(header="stage"), *(Column(header=head, right=True) for head in HEADS)]
    page.table(columns, [Row(cells=cells_of(row)) for row in rows])
    page.blank()
    for name, line in lines_of(rows, machine):
        page.line(Text(f" {name:<9} {line}"))


def run_title(rows: Sequence[StageRow]) -> str:
    """What is run, and where."""
    first = rows[0].plan
    here = "" if all(row.plan.fit is None for row in rows) else f" on {first.target}"
    return f"run of {first.model}: {len(rows)} stage{'s' * (len(rows) > 1)}{here}"


def goal_of(rows: Sequence[StageRow]) -> str:
    """The budget in words."""
    memory = rows[0].plan.goal.memory
    return "no limit on memory" if memory is None else f"peak memory ≤ {format_bytes(memory)}"


def cells_of(row: StageRow) -> list[str]:
    """A stage as a row of the table, in the order of `HEADS`."""
    return [
        row.name, f"{row.batch}", f"{row.steps:,}", "–" if row.peak is None else format_bytes(row.peak),
        format_seconds(row.seconds), format_seconds(row.whole),
        "–" if row.rate is None else f"{row.rate:.3g}",
    ]  # fmt: skip


def lines_of(rows: Sequence[StageRow], machine: RunMachine) -> list[tuple[str, str]]:
    """What stands below the table: what it comes to, what was measured, and what the stages' fields say."""
    found = totals(rows, machine)
    lines = [
        (
            "whole",
            f"{found['steps']:,} steps, {found['examples']:,} examples, "
            f"{format_seconds(found['seconds'])} predicted",
        )
    ]
    if found["tokens"]:
        each = found["tokens_per_parameter"]
        lines.append(
            (
                "tokens",
                f"{format_count(found['tokens'])}: {each:.3g} for each parameter, beside {CHINCHILLA} "
                "(Chinchilla)",
            )
        )
    counted = "" if found["flops"] is None else f"{found['flops']:.3g} counted"
    approximate = "" if not found["tokens"] else f"{found['flops_6nd']:.3g} by 6ND"
    if counted or approximate:
        lines.append(("FLOPs", ", ".join(filter(None, (counted, approximate)))))
    if found["kilowatt_hours"] is not None:
        lines.append(("energy", f"{found['kilowatt_hours']:.3g} kWh at {machine.watts:g} W"))
    if found["price"] is not None:
        lines.append(("price", f"{found['price']:.3g} $ at {machine.price:g} $ an hour"))
    if taken := sum(row.taken for row in rows):
        foreseen, spent = sum(row.taken * row.seconds for row in rows), sum(row.spent for row in rows)
        lines.append(
            (
                "measured",
                f"{taken:,} steps took {format_seconds(spent)}, {format_seconds(foreseen)} predicted",
            )
        )
    return lines + [(f"stage {number}", note) for number, row in enumerate(rows, 1) for note in row.notes]


class RunTotals(TypedDict):
    """What the stages of a run come to; None where it is not known.

    Tokens are those that are read, FLOPs of all steps.
    """

    steps: int
    examples: int
    seconds: float
    hours: float
    tokens: float
    tokens_per_parameter: float
    flops: float | None
    flops_6nd: float
    kilowatt_hours: float | None
    price: float | None


def totals(rows: Sequence[StageRow], machine: RunMachine) -> RunTotals:
    """What the stages come to: 6ND is six FLOPs for each parameter and token (Kaplan et al. 2020, arXiv
    2001.08361).
    """
    seconds, tokens = sum(row.whole for row in rows), sum(row.tokens for row in rows)
    flops = (
        None
        if any(row.flops is None for row in rows)
        else sum(row.steps * (row.flops or 0.0) for row in rows)
    )
    hours = seconds / _HOUR
    return {
        "steps": sum(row.steps for row in rows), "examples": sum(row.steps * row.batch for row in rows),
        "seconds": seconds, "hours": hours, "tokens": tokens,
        "tokens_per_parameter": tokens / max(1, rows[-1].parameters), "flops": flops,
        "flops_6nd": 6.0 * sum(row.parameters * row.tokens for row in rows),
        "kilowatt_hours": None if machine.watts is None else machine.watts * hours / 1000,
        "price": None if machine.price is None else machine.price * hours,
    }  # fmt: skip


def run_data(
    rows: Sequence[StageRow], stages: Sequence[Mapping[str, object]], machine: RunMachine
) -> dict[str, object]:
    """A run as JSON has it."""
    told = [
        {
            **stage,
            "examples": row.batch,
            "peak_bytes": row.peak,
            "seconds": row.seconds,
            "flops": row.flops,
            "notes": list(row.notes),
            "plan": row.plan.to_dict(),
        }
        for stage, row in zip(stages, rows, strict=True)
    ]
    return {"stages": told, **totals(rows, machine)}
