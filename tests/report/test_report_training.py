"""The report of a training plan: the memory chart, the frontier plot, the figures of the tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import training_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_report_html import Checker
from test_report_text import render

from effcompile.core.goal import Goal
from effcompile.ir.figures import Totals
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import MemoryTimeline
from effcompile.report import (
    diff,
    explain,
    find_site,
    frontier_html,
    html_report,
    print_frontier,
    print_infeasible,
    print_plan,
)
from effcompile.report.chart import Line, bar, bytes_like, dots_of, frontier_chart, memory_chart, resample
from effcompile.report.figures import headline
from effcompile.report.infeasible import command
from effcompile.report.reasons import words

MIB = samples.MIB

PAGES: dict[str, Callable[[Console], None]] = {
    "training": lambda c: print_plan(samples.gpt2(), c, directory="out"),
    "training_verbose": lambda c: print_plan(samples.gpt2(), c, verbose=True),
    "training_planned": lambda c: print_plan(samples.planned_only(), c),
    "training_over": lambda c: print_plan(samples.over_budget(), c, directory="out"),
    "training_explain": lambda c: explain(samples.gpt2(), "transformer.h.3.mlp", c),
    "training_explain_head": lambda c: explain(samples.gpt2(), "lm_head", c),
    "training_list": lambda c: explain(samples.gpt2(), None, c),
    "training_diff": lambda c: diff(samples.gpt2(), samples.over_budget(), c),
    "training_frontier": lambda c: print_frontier(samples.front(), c, others=samples.OTHERS),
    "training_infeasible": lambda c: print_infeasible(
        *samples.infeasible(),
        c,
        arguments=["optimize", "my model.py", "--mode", "training", "--memory", "200MiB"],
    ),
}


@pytest.mark.parametrize("width", [44, 60, 72, 80, 100, 120, 150, 300])
@pytest.mark.parametrize("name", PAGES)
def test_no_line_is_wider_than_the_console_except_commands(name: str, width: int) -> None:
    lines = render(PAGES[name], width).splitlines()
    commands = ("effcompile ", "plan.save(", "effcompile.optimize(")
    assert [
        line for line in lines if cell_len(line) > width and not any(command in line for command in commands)
    ] == []
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_ascii_where_the_encoding_has_nothing_else(name: str) -> None:
    text = render(PAGES[name], 80, encoding="ascii")
    assert text.isascii()
    assert "?" not in text.replace("? predicted", ""), "a glyph of ours has no ASCII form"


def line_text(line: Line) -> str:
    return "".join(text for text, _ in line)


timelines = st.builds(
    lambda points, forward, parameters, phase: MemoryTimeline(
        points=tuple(points),
        forward_points=min(forward, len(points)),
        parameter_bytes=min(parameters, min(points)),
        peak_phase=phase,
        peak_site="h.1",
        peak_node="mm",
    ),
    st.lists(st.integers(0, 2**36), min_size=1, max_size=160),
    st.integers(0, 160),
    st.integers(0, 2**36),
    st.sampled_from(["forward", "backward"]),
)


@given(timelines, st.none() | st.integers(1, 2**37), st.integers(40, 160))
@settings(max_examples=150, deadline=None)
def test_any_timeline_is_drawn_in_its_width_with_one_peak(
    timeline: MemoryTimeline, limit: int | None, width: int
) -> None:
    lines = [line_text(line) for line in memory_chart(timeline, limit, width)]
    assert {len(line) for line in lines} == {width}
    assert "".join(lines).count("▼") == 1
    divided = 0 < timeline.forward_points < len(timeline.points)
    assert lines[-1].count("┴") == divided


def test_the_chart_is_as_high_as_the_points() -> None:
    """Nine rows of eight steps: a point at half the budget fills half of them."""
    line = MemoryTimeline(
        points=(0, 50, 100, 25),
        forward_points=2,
        parameter_bytes=0,
        peak_phase="backward",
        peak_site="",
        peak_node="",
    )
    rows = [line_text(row)[12:] for row in memory_chart(line, 100, 12 + 9)]
    heights = ["".join(row[column] for row in rows[1:-1]) for column in (0, 2, 5, 7)]
    assert [sum("▁▂▃▄▅▆▇█".find(c) + 1 for c in column) for column in heights] == [0, 36, 72, 18]
    assert [row[4] for row in rows[:-1]] == ["│"] * 10
    assert rows[0].replace("│", "") == "┄┄┄┄▼┄┄┄"


def test_a_budget_is_never_drawn_below_what_it_holds() -> None:
    text = render(PAGES["training"], 80)
    assert "┤┄┄ budget ┄" in text
    over = [line for line in render(PAGES["training_over"], 80).splitlines() if "budget" in line]
    assert "┄█" in over[0], "the points over the budget cross its line"
    far = render(PAGES["training_planned"], 80)
    assert "the budget, 80.00 GiB, is far above" in far
    assert "┄" not in far


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200), st.integers(1, 200))
def test_resampling_loses_no_peak(values: list[int], columns: int) -> None:
    found = resample(values, columns)
    assert len(found) == columns
    assert set(found) <= set(values)
    if columns <= len(values):
        assert max(found) == max(values)


def test_bars_and_axis_labels() -> None:
    assert [bar(part, 4) for part in (0, 0.001, 0.5, 0.53125, 1, 2)] == ["", "▏", "██", "██▏", "████", "████"]
    assert bytes_like(512 * MIB, 2048 * MIB) == "0.50 GiB"
    assert bytes_like(512 * MIB, 900 * MIB) == "512.0 MiB"


def test_frontier_plot_places_less_memory_left_and_less_time_low() -> None:
    lines = [line_text(line) for line in frontier_chart(dots_of(samples.front(), samples.OTHERS), 79)]
    spots = [(row, line.index("●")) for row, line in enumerate(lines) if "●" in line]
    columns = [column for _, column in spots]
    assert columns == sorted(columns), "from the top left to the bottom right"
    assert lines[0][12] == "●"
    assert {letter for line in lines for letter in line if letter in "AB"} >= {"A", "B"}
    assert max(map(len, lines)) <= 79


def test_frontier_of_one_plan_or_none_has_no_plot() -> None:
    assert "┤" not in render(lambda c: print_frontier(samples.front()[:1], c), 80)
    assert "no plans" in render(lambda c: print_frontier([], c), 80)
    assert frontier_html([]).endswith("</html>\n")


def test_extra_time_of_others_only_against_a_measured_step() -> None:
    front = samples.front()
    assert "A          –    806.0 MiB         5.17 s        –" in render(
        lambda c: print_frontier(front, c, others=samples.OTHERS), 80
    )
    measured = [replace(front[0], measured_baseline=Totals(seconds=4.7)), *front[1:]]
    text = render(lambda c: print_frontier(measured, c, others=samples.OTHERS), 80)
    assert "A          –    806.0 MiB         5.17 s  +10.0 %" in text


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f" {name}")).split()


def test_totals_of_a_step() -> None:
    text = render(PAGES["training"], 120)
    assert row(text, "time per step")[3:] == [
        "4.31",
        "s",
        "4.29",
        "s",
        "4.69",
        "s",
        "4.64",
        "s",
        "1.08×",
        "1.01×",
    ]
    assert row(text, "extra time")[2:] == ["–", "–", "+8.9", "%", "+8.2", "%", "–", "–"]
    assert "weight bytes" not in text


def test_one_row_per_class_with_what_it_saves_and_costs() -> None:
    text = render(PAGES["training"], 80)
    assert row(text, "checkpoint")[1:] == [
        "recompute",
        "gelu,",
        "layer_norm",
        "7",
        "168.0",
        "MiB",
        "+133",
        "ms",
        "+3.1",
        "%",
    ]
    assert row(text, "loss head")[2:] == [
        "whole",
        "→",
        "8",
        "chunks",
        "1",
        "515.0",
        "MiB",
        "+41.0",
        "ms",
        "+1.0",
        "%",
    ]
    assert row(text, "gradient")[1:] == ["separate", "→", "in", "place", "1", "147.0", "MiB", "–", "–"]
    assert "transformer.h.{2–8}" in text


@pytest.mark.parametrize(
    ("plan", "met", "says"),
    [
        (samples.gpt2(), True, ""),
        (
            samples.gpt2(measured=Totals(seconds=1.0, peak_bytes=1200 * MIB, error=0.0)),
            False,
            "measured peak memory",
        ),
        (samples.gpt2(predicted=Totals(seconds=1.0, peak_bytes=1200 * MIB)), False, "predicted peak memory"),
        (
            samples.gpt2(predicted=Totals(peak_bytes=1100 * MIB + 1)),
            False,
            "1,153,433,601 B > 1,153,433,600 B",
        ),
        (samples.gpt2(goal=Goal(mode="training")), True, ""),
    ],
)
def test_met_holds_for_the_predicted_and_the_measured_peak(plan: Plan, met: bool, says: str) -> None:
    assert plan.met is met
    assert says in " ".join(render(lambda c: print_plan(plan, c), 120).split())


def test_exactness_is_claimed_only_where_it_was_verified() -> None:
    assert "bit-identical" in render(PAGES["training"], 80).split("memory over")[0]
    assert "bit-identical" not in render(PAGES["training_planned"], 80)
    assert "exact" in render(PAGES["training_planned"], 80).split("memory over")[0]
    assert "error 2.0e-3" in render(PAGES["training_over"], 80).split("memory over")[0]


def test_no_command_that_a_training_plan_does_not_have() -> None:
    text = render(PAGES["training"], 80)
    assert "effcompile run" not in text
    assert 'effcompile.optimize(model, plan="out/plan.json")' in text


@pytest.mark.parametrize(
    ("part", "site"),
    [
        ("transformer.h.3", "transformer.h.3"),
        ("h.1", "transformer.h.1"),  # not h.10, h.11
        ("transformer.h.3.mlp", "transformer.h.3"),
        ("transformer.h.11.attn.c_proj", "transformer.h.11"),
        ("h.3.mlp", "transformer.h.3"),
        ("wte", "transformer.wte.weight"),
    ],
)
def test_a_module_is_explained_by_its_block(part: str, site: str) -> None:
    assert find_site(samples.gpt2(), part) == site


def test_explain_tells_every_alternative_and_why_not() -> None:
    text = " ".join(render(PAGES["training_explain"], 120).split())
    declined = [d for d in samples.declined() if d.site == "transformer.h.3"]
    assert len(declined) == 3
    assert all(" ".join(words(d.reason).split()) in text and d.option in text for d in declined)


def test_infeasible_gives_the_command_to_run() -> None:
    text = render(PAGES["training_infeasible"], 80)
    assert "effcompile optimize 'my model.py' --mode training --memory 0.58GiB" in text
    assert "the smallest budget that is feasible" in text
    assert (
        command(["plan", "m.py", "--memory=1KiB", "-v"], "memory", 2**30)
        == "effcompile plan m.py -v --memory 1.00GiB"
    )
    assert command(["plan", "m.py"], "max_error", 0.01) == "effcompile plan m.py --max-error 1.0e-2"


def html_of(document: str) -> Checker:
    checker = Checker()
    checker.feed(document)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("make", [samples.gpt2, samples.planned_only, samples.over_budget])
def test_html_has_the_plot_and_needs_no_network(make: Callable[[], Plan]) -> None:
    document = html_report(make())
    checker = html_of(document)
    assert {"svg", "path", "circle"} <= set(checker.tags)
    assert checker.tags.count("script") <= 1
    assert not re.search(r"https?://|@import|url\(", document)
    assert any(text.startswith("peak ") for text in checker.text)
    assert {"forward", "backward"} <= set(checker.text)
    assert "weight bytes" not in checker.text


def test_html_plot_is_as_high_as_the_points() -> None:
    line = MemoryTimeline(
        points=(10, 100, 50),
        forward_points=1,
        parameter_bytes=10,
        peak_phase="backward",
        peak_site="",
        peak_node="",
    )
    document = html_report(samples.gpt2(goal=Goal(mode="training"), memory_timeline=line))
    path = re.search(r'<path d="M[\d.]+ ([\d.]+)((?:V[\d.]+H[\d.]+)+)', document)
    assert path is not None
    base = float(path[1])
    heights = [base - float(y) for y in re.findall(r"V([\d.]+)", path[2])]
    assert [h / max(heights) for h in heights] == pytest.approx([0.1, 1.0, 0.5], abs=1e-3)


def test_html_frontier() -> None:
    hostile = ('<img src=x onerror="x">', 806 * MIB, 5.0)
    document = frontier_html(samples.front(), [*samples.OTHERS, hostile])
    checker = html_of(document)
    assert "img" not in checker.tags
    assert checker.tags.count("circle") == 10
    assert "HF checkpointing, measured" in checker.text
    assert "584.0 MiB" in checker.text


def test_optional_fields_may_be_absent_and_all_come_back() -> None:
    plan = samples.gpt2()
    data = plan.to_dict()
    assert Plan.from_dict(data) == plan
    del data["memory_timeline"], data["levers"]
    old = Plan.from_dict(data)
    assert old.memory_timeline is None
    assert old.levers == ()


def test_a_measured_step_is_not_said_to_be_faster_by_a_prediction() -> None:
    """The original did not fit, and was not run: 3.98 s and 3.84 s were predicted, the step took 5.36 s."""
    plan = samples.gpt2(
        baseline=Totals(seconds=3.98, peak_bytes=2 << 30, error=0.0),
        predicted=Totals(seconds=3.84, peak_bytes=1 << 30, error=0.0),
        measured=Totals(seconds=5.36, peak_bytes=1 << 30, error=0.0),
        measured_baseline=None,
    )
    told = headline(plan)
    assert "step 5.36 s measured · the original's 3.98 s predicted" in told and "%" not in told
    assert "step −3.5 %: 3.98 s → 3.84 s" in headline(replace(plan, measured=None))
