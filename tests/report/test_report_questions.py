"""Questions about a saved plan: the figures are those of its decisions, and an exchange is what brute force
over its options finds.
"""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import samples
import training_samples
from rich.console import Console

from effcompile import report
from effcompile.core.cost import Cost
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.core.units import parse_bytes
from effcompile.ir.exchange import held_bytes, less, more, settled
from effcompile.ir.figures import Totals
from effcompile.ir.plan import Decision, Declined, Plan

#: Seconds and bytes of each option of three sites, the taken one first.
SITES = {
    "a": {"small": (5.0, 10), "middle": (3.0, 20), "large": (1.0, 40)},
    "b": {"small": (4.0, 10), "large": (3.5, 30)},
    "c": {"middle": (2.0, 20), "small": (6.0, 5), "large": (1.5, 25)},
}


def plan_of(sites: dict[str, dict[str, tuple[float, int]]]) -> Plan:
    def cost(figures: tuple[float, int]) -> Cost:
        return Cost(seconds=figures[0], weight_bytes=figures[1])

    taken = {site: next(iter(options.items())) for site, options in sites.items()}
    decisions = [
        Decision(
            site=s, kind="linear", option=o, baseline=o, by="quantize", cost=cost(c), baseline_cost=cost(c)
        )
        for s, (o, c) in taken.items()
    ]
    declined = [
        Declined(site=s, kind="linear", option=o, by="quantize", reason=Because("not now"), cost=cost(c))
        for s, options in sites.items()
        for o, c in list(options.items())[1:]
    ]
    totals = Totals(
        seconds=sum(c[0] for _, c in taken.values()),
        peak_bytes=sum(c[1] for _, c in taken.values()),
        error=0.0,
    )
    return samples.bert(
        decisions=tuple(decisions),
        declined=tuple(declined),
        predicted=totals,
        goal=Goal(memory=totals.peak_bytes),
        memory_timeline=None,
    )


def brute(room: float) -> float:
    """The least time with at most so many more bytes than taken."""
    held = sum(next(iter(options.values()))[1] for options in SITES.values())
    ways = product(*(options.values() for options in SITES.values()))
    return min(sum(s for s, _ in way) for way in ways if sum(b for _, b in way) <= held + room)


@pytest.mark.parametrize("room", [0, 5, 10, 15, 30, 35, 55, 100])
def test_more_is_at_most_one_exchange_from_the_best(room: int) -> None:
    plan = plan_of(SITES)
    found = more(plan, room, held_bytes)
    seconds = plan.predicted.seconds + sum(e.seconds for e in found)
    assert sum(e.used for e in found) <= room
    largest = max(s for options in SITES.values() for s, _ in options.values())
    assert brute(room) <= seconds < brute(room) + largest
    # where the knapsack has a gap that greed does not fill
    assert seconds == brute(room) or room in (10, 15, 35)


@pytest.mark.parametrize("needed", [1, 15])
def test_less_gives_back_what_is_needed_at_the_least_price(needed: int) -> None:
    plan = plan_of(SITES)
    found = settled(plan, -needed, held_bytes)
    assert found is not None
    assert -sum(e.used for e in found) >= needed
    assert plan.predicted.seconds + sum(e.seconds for e in found) == brute(-needed)
    assert less(plan, 16, held_bytes) is None
    assert settled(plan, -16, held_bytes) is None


def test_rows_are_the_decisions_one_by_one() -> None:
    plan = samples.bert()
    by_error = report.ranked(plan, "error")
    assert [item.amount for item in by_error] == sorted(
        (d.cost.error for d in plan.decisions if d.cost.error_squared), reverse=True
    )
    assert sum(item.amount for item in report.ranked(plan, "time")) == pytest.approx(
        max(plan.predicted.seconds, sum(d.cost.seconds for d in plan.decisions))
    )
    assert sum(item.amount for item in report.ranked(plan, "memory")) >= plan.predicted.peak_bytes
    with pytest.raises(UnknownNameError, match="Known: error, memory, time"):
        report.ranked(plan, "colour")


def test_memory_of_a_training_step_begins_with_what_lives_at_the_peak() -> None:
    plan = training_samples.gpt2()
    parts = sorted(plan.memory_timeline.parts.values(), reverse=True)
    assert [item.amount for item in report.ranked(plan, "memory")][: len(parts)] == parts


@pytest.mark.parametrize(
    "plan",
    [samples.bert(), training_samples.gpt2(), plan_of(SITES)],
    ids=["inference", "training", "limited"],
)
@pytest.mark.parametrize("width", [40, 80, 160])
def test_everything_prints_within_the_page(plan: Plan, width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for by in ("time", "error", "memory"):
        report.print_ranked(plan, by, 3, console)
    for question in ("memory=+10%", "memory=-5%", "memory=60B" if plan.model == "Toy" else "memory=1GiB"):
        report.print_what_if(plan, question, console)
    report.print_curve(plan, 5, console)
    text = console.export_text()
    assert "nan" not in text
    commands = [line for line in text.splitlines() if line.strip().startswith("next")]
    assert all(len(line) <= width for line in text.splitlines() if line not in commands)


def test_what_if_says_which_site_changes() -> None:
    told = report.what_if(plan_of(SITES), "memory=+25%")
    assert (told.was, told.now, told.binds) == (40, 50, True)
    assert [(e.site, e.option) for e in told.exchanges or ()] == [("a", "middle")]
    assert told.seconds_now == told.seconds_was - 2.0
    json.dumps(told.data())


def test_a_site_of_several_kinds_has_the_options_of_each() -> None:
    """A block of a step is one by what it keeps, and by its element-wise kernels, which cost nothing."""
    plan = plan_of(SITES)
    first = plan.decisions[0]
    kernels = replace(
        first,
        kind="element-wise",
        option="7 kernels",
        baseline="one by one",
        cost=Cost(),
        baseline_cost=Cost(),
    )
    both = plan.with_changes(decisions=(*plan.decisions, kernels))
    assert report.what_if(both, "memory=+25%") == report.what_if(plan, "memory=+25%")


def test_a_form_of_the_whole_step_holds_nothing_of_its_own() -> None:
    plan = training_samples.gpt2()
    head = replace(
        plan.decisions[0],
        site="lm_head",
        kind="loss head",
        cost=replace(plan.decisions[0].cost, bytes_kept=1 << 40),
    )
    told = report.ranked(plan.with_changes(decisions=(*plan.decisions, head)), "memory")
    assert told == report.ranked(plan, "memory")
    assert all(item.part is None or item.part <= 1 for item in told)


@pytest.mark.parametrize("memory", ["700B", "900KiB", "3GiB", "17.3GiB", "640GB", "3TiB"])
def test_what_is_to_be_typed_is_the_size_that_was_asked_for(memory: str) -> None:
    """`1.024e+04MiB` is no size."""
    console = Console(width=120, record=True, file=io.StringIO())
    report.print_what_if(training_samples.gpt2(), f"memory={memory}", console)
    typed = re.findall(r"--memory (\S+)", console.export_text())
    assert typed and parse_bytes(memory) <= parse_bytes(typed[-1]) <= parse_bytes(memory) + 0.01 * (1 << 20)


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    plan = plan_of(SITES).with_changes(goal=Goal(memory=4000))
    told = report.what_if(plan, "memory=+10%")
    assert not told.binds
    assert told.exchanges == ()
    assert report.what_if(plan, "memory=-10%").exchanges == ()


def test_the_goals_own_name_of_a_limit_asks_too() -> None:
    assert report.what_if(samples.bert(), "max_error=0.05") == report.what_if(samples.bert(), "error=0.05")


def test_parts_of_what_takes_time_away_are_negative_so_that_all_add_up() -> None:
    plan = samples.bert()
    merged = next(d for d in plan.decisions if d.kind == "linear")
    saving = replace(
        merged, site="merged", kind="merge", cost=replace(merged.cost, seconds=-plan.predicted.seconds / 4)
    )
    told = report.ranked(plan.with_changes(decisions=(*plan.decisions, saving)), "time")
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_ranked(plan.with_changes(decisions=(*plan.decisions, saving)), "time", 500, console)
    assert told[-1].part == -0.25
    assert any("merged" in line and "−25 %" in line for line in console.export_text().splitlines())


@pytest.mark.parametrize(
    "question", ["memory", "memory=", "time=+10%", "memory=lots", "memory=-100%", "memory=+nan%", "error=x"]
)
def test_questions_that_are_none(question: str) -> None:
    with pytest.raises(UsageError):
        report.what_if(samples.bert(), question)


def test_the_curve_of_a_plan_never_pays_more_for_more() -> None:
    points = report.curve(plan_of(SITES), 12)
    assert any(change == "the plan itself" for _, _, change in points)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))
    assert len(report.curve(plan_of(SITES), 2)) == 2


def test_plans_for_several_machines_side_by_side(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    report.print_side_by_side({"h100-sxm": training_samples.gpt2(), "small": "it needs 3 GiB"}, console)
    text = console.export_text()
    assert "h100-sxm" in text
    assert "it needs 3 GiB" in text
