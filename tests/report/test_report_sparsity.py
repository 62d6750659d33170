"""The report of sparse training runs (real_sparsity.py): golden texts, and what they must always say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import real_sparsity as real
from rich.cells import cell_len
from rich.console import Console
from test_report_text import assert_golden, render

import effcompile
from effcompile.report import print_sparsity

PAGES: dict[str, Callable[[Console], None]] = {
    "sparsity_measured": lambda c: print_sparsity(real.measured(), c),
    "sparsity_static": lambda c: print_sparsity(real.static(), c),
    "sparsity_no_gain": lambda c: print_sparsity(real.no_gain(), c),
    "sparsity_nothing": lambda c: print_sparsity(real.nothing(), c),
}


@pytest.mark.parametrize("name", PAGES)
def test_golden(name: str) -> None:
    assert_golden(name, render(PAGES[name], 80))


@pytest.mark.parametrize("width", [44, 60, 72, 80, 100, 120, 150, 300])
@pytest.mark.parametrize("name", PAGES)
def test_no_line_is_wider_than_the_console(name: str, width: int) -> None:
    lines = render(PAGES[name], width).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_matched_dense_model_is_always_named_and_ascii_will_do(name: str) -> None:
    text = render(PAGES[name], 80, encoding="ascii")
    assert "the dense model of equal FLOPs" in text
    assert "?" not in text


def test_figures_print_themselves() -> None:
    assert effcompile.__all__  # puts the printer in place
    assert render(real.measured().print, 100) == render(PAGES["sparsity_measured"], 100)
