"""The report of a sparse training run: golden texts, and what they must always say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from test_report_text import assert_golden, render

import effcompile
from effcompile.ir.sparsity import Efficiency, LayerFigures, SparsityFigures, StepFlops
from effcompile.report import print_sparsity


def layer(index: int, name: str, rows: int, columns: int) -> LayerFigures:
    blocks = rows * columns // 256
    return LayerFigures(
        name=f"encoder.layer.{index}.{name}", out_features=rows, in_features=columns, blocks=blocks, active=round(blocks * 0.1),
        explored=round(blocks * 0.62), empty_rows=3 * (name == "output.dense"), execution="blocks" if index else "masked",
    )  # fmt: skip


SHAPES = {"attention.self.query": (768, 768), "intermediate.dense": (3072, 768), "output.dense": (768, 3072)}
MEASURED = SparsityFigures(
    model="BertForMaskedLM", sparsity=0.9, block=16, growth="random", distribution="uniform", step=4_200, updates_done=33, updates=80,
    next_update=4_321, layers=tuple(layer(i, name, *shape) for i in range(3) for name, shape in SHAPES.items()),
    other_parameters=24_000_000, width=768, depth=3, flops=StepFlops(inside=4e11, outside=4e10, rest=2e10, saved=3.6e11),
    efficiency=Efficiency(sparse_seconds=0.31, dense_seconds=1.9, sparse_flops=4e10, dense_flops=4e11),
)  # fmt: skip
STATIC = replace(
    MEASURED, updates=0, updates_done=0, next_update=None, efficiency=None, sparsity=0.8, block=4,
    flops=StepFlops(inside=4e8, outside=4e8, rest=0, saved=3.6e8, of="row"),
)  # fmt: skip
NO_GAIN = replace(MEASURED, efficiency=Efficiency(sparse_seconds=2.1, dense_seconds=1.9, sparse_flops=4e10, dense_flops=4e11))
PAGES: dict[str, Callable[[Console], None]] = {
    "sparsity_measured": lambda c: print_sparsity(MEASURED, c),
    "sparsity_static": lambda c: print_sparsity(STATIC, c),
    "sparsity_no_gain": lambda c: print_sparsity(NO_GAIN, c),
    "sparsity_nothing": lambda c: print_sparsity(replace(STATIC, layers=(), width=0, depth=0), c),
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
    assert render(MEASURED.print, 100) == render(PAGES["sparsity_measured"], 100)
