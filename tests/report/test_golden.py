"""What is printed of real tiny plans, at one width as golden texts, and at every other width: nothing too
wide, nothing lost.

Update the texts with UPDATE_GOLDEN=1 and read the diff.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import real_plans as real
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_report_devices import ASKED as DEVICES
from test_report_sparsity import PAGES as SPARSE
from test_report_text import GOLDEN, assert_golden, render
from torch_formats import lacking

from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target
from effcompile.report import diff, explain, print_frontier, print_infeasible, print_plan, targets_table
from effcompile.report.reasons import words

TYPED = ["plan", "model.py", "--mode", "training", "--memory"]

PAGES: dict[str, Callable[[Console], None]] = {
    "inference": lambda c: print_plan(real.quantised(), c, directory="out"),
    "inference_verbose": lambda c: print_plan(real.quantised(), c, verbose=True),
    "inference_exact": lambda c: print_plan(real.exact(), c),
    "inference_smallest": lambda c: print_plan(real.smallest(), c),
    "inference_run": lambda c: print_plan(real.run(), c, directory="out"),
    "inference_nothing": lambda c: print_plan(real.nothing(), c),
    "inference_infeasible": lambda c: print_infeasible(
        real.too_small(), Goal(max_error=1e-4, memory="100KiB"), c
    ),
    "inference_frontier": lambda c: print_frontier(real.front(), c),
    "inference_sites": lambda c: explain(real.quantised(), None, c),
    "inference_linear": lambda c: explain(real.quantised(), "h.1.up", c),
    "inference_attention": lambda c: explain(
        real.quantised(), real.site_of(real.quantised(), "attention"), c
    ),
    "inference_diff": lambda c: diff(real.quantised(), real.exact(), c),
    "training": lambda c: print_plan(real.step(), c, directory="out"),
    "training_verbose": lambda c: print_plan(real.step(), c, verbose=True),
    "training_states": lambda c: print_plan(real.step_with_states(), c),
    "training_elsewhere": lambda c: print_plan(real.elsewhere(), c),
    "training_sites": lambda c: explain(real.step(), None, c),
    "training_block": lambda c: explain(real.step(), "h.0", c),
    "training_head": lambda c: explain(real.step(), real.site_of(real.step(), "loss head"), c),
    "training_diff": lambda c: diff(real.step(), real.step_with_states(), c),
    "training_frontier": lambda c: print_frontier(real.step_front(), c),
    "training_infeasible": lambda c: print_infeasible(
        real.step_too_large(), Goal(mode="training", memory="2MiB"), c, arguments=[*TYPED, "2MiB"]
    ),
    "training_no_room": lambda c: print_infeasible(
        real.states_too_large(), Goal(mode="training", memory=real.LITTLE), c
    ),
    "targets": lambda c: targets_table(
        [load_target("h100-sxm"), load_target("cpu-generic")], c, verbose=True
    ),
}
#: Lines that are copied as they are, however narrow the page is.
COMMANDS = ("effcompile ", "InferenceSession(", "plan.save(", "effcompile.optimize(")


@pytest.mark.parametrize("name", PAGES)
def test_golden(name: str) -> None:
    if name == "inference_run" and (reason := lacking("bf16")):
        pytest.skip(reason)  # it is lowered and run here, and was so in bf16
    assert_golden(name, render(PAGES[name], 80))


def test_there_is_no_golden_text_that_nothing_prints() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*PAGES, *SPARSE, *DEVICES}


@cache
def widest(name: str) -> str:
    """A page at 200 columns."""
    return render(PAGES[name], 200)


@pytest.mark.parametrize("name", PAGES)
@given(width=st.integers(60, 200))
@settings(max_examples=8, deadline=None)
def test_every_width_holds_all_that_the_widest_says(name: str, width: int) -> None:
    lines = render(PAGES[name], width).splitlines()
    assert [
        line for line in lines if cell_len(line) > width and not any(command in line for command in COMMANDS)
    ] == []
    assert all(line == line.rstrip() for line in lines)
    assert _said(widest(name)) <= _said("\n".join(lines)) or "…" in "\n".join(lines)


@pytest.mark.parametrize("name", PAGES)
def test_ascii_where_the_encoding_has_nothing_else(name: str) -> None:
    text = render(PAGES[name], 80, encoding="ascii")
    assert text.isascii()
    assert "?" not in text.replace("? predicted", "").replace("? not verified", ""), (
        "a glyph of ours has no ASCII form"
    )


@pytest.mark.parametrize(
    "plan", [real.quantised, real.step, real.step_with_states], ids=["inference", "training", "states"]
)
@given(width=st.integers(60, 200))
@settings(max_examples=5, deadline=None)
def test_every_reason_of_a_site_is_told_whole_at_every_width(plan: Callable[[], Plan], width: int) -> None:
    for declined in plan().declined[:40:4]:
        if declined.site:
            text = render(lambda c, site=declined.site: explain(plan(), site, c), width)  # type: ignore[misc]
            assert _squeezed(words(declined.reason)) in _squeezed(text) or "…" in text, (
                "only a word as wide as the column is cut"
            )


def _said(text: str) -> set[str]:
    """The figures of a page with their units, the charts left out."""
    body = "\n".join(line for line in text.splitlines() if not re.search(r"[┤│▁▂▃▄▅▆▇█┄]", line))
    return set(re.findall(r"\d+(?:\.\d+)? (?:µs|ms|s|B|KiB|MiB|GiB)\b", body))


def _squeezed(text: str) -> str:
    """Without the spaces that a wrapped column has."""
    return "".join(text.split())
