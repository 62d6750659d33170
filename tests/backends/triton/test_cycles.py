"""The cycle model of attention's kernels: its arithmetic on kernels that are made up, and what it foresees of
the table's tiles for an H100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from effcompile.backends.triton.aot import Report
from effcompile.backends.triton.aot_loops import Loop, loops
from effcompile.backends.triton.configs import LaunchConfig

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")


@pytest.fixture(scope="module")
def cycles() -> Iterator[Any]:
    yield from imported("_cycles")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield from imported("gpu_model")


def imported(name: str) -> Iterator[Any]:
    """A benchmark's module, without its folder among the tests' own."""
    sys.path.insert(0, BENCHMARKS)
    try:
        yield __import__(name)
    finally:
        sys.path.remove(BENCHMARKS)


def step(**changes: Any) -> Loop:
    made: dict[str, Any] = {"instructions": 108, "products": {"64x128x16 of registers": 8}} | changes
    return Loop(**made)


def test_a_steps_cycles_are_those_of_its_units(cycles: Any) -> None:
    """A product of 64 × 128 × 16 is 64 cycles of 4096 operations; a warp's other instructions begin one a
    cycle of its scheduler; 2**x takes a cycle for 16.
    """
    found = cycles.cycles(step(), 4, cycles.H100)
    assert (found.tensor, found.rest, found.waits) == (8 * 64, 100, 0)
    twice = cycles.cycles(step(), 8, cycles.H100)
    assert (twice.tensor, twice.rest) == (2 * 8 * 64, 200)
    assert cycles.cycles(step(exponentials=64), 4, cycles.H100).rest == 64 * 128 / 16
    assert cycles.cycles(step(waits=3), 4, cycles.H100).waits == 3 * cycles.H100.wait


def test_narrow_products_wait_for_shared_memory(cycles: Any) -> None:
    """64 × 16 × 16: 8 cycles of arithmetic, and 20 for 2,560 bytes where both operands lie there."""
    shared, registers = (cycles.cycles(step(products={name: 1}), 4, cycles.H100).tensor
                         for name in ("64x16x16", "64x16x16 of registers"))  # fmt: skip
    assert (shared, registers) == (20, 8)


def test_products_of_a_warp_are_slower(cycles: Any) -> None:
    group = cycles.cycles(step(products={"64x128x16 of registers": 1}), 4, cycles.H100).tensor
    single = cycles.cycles(step(products={"16x8x16": 16}), 4, cycles.H100).tensor  # the same, by four warps
    assert single == pytest.approx(group / cycles.H100.warp_share)


def test_programs_on_a_processor_fill_each_others_gaps_in_part(cycles: Any) -> None:
    one = cycles.Cycles(tensor=500.0, rest=300.0, waits=200.0)
    assert one.of(1, 0.6) == 1000
    assert one.of(2, 0.0) == 1000, "as much as fits"
    assert one.of(2, 1.0) == 2000, "one after the other"
    assert one.of(4, 0.0) == 2000, "the tensor cores are busy"
    assert one.of(2, 0.0) < one.of(2, 0.6) < one.of(2, 1.0)


def test_what_a_processor_holds(cycles: Any) -> None:
    report = Report(shared=64 << 10, registers=255)
    assert cycles.resident(report, 4, cycles.H100) == 2
    assert cycles.resident(replace(report, registers=128, shared=16 << 10), 4, cycles.H100) == 4
    assert cycles.resident(replace(report, shared=200 << 10, registers=64), 8, cycles.H100) == 1


def test_programs_begin_where_others_end(cycles: Any) -> None:
    """Five of two, one and one, two, four cycles on two processors of a slot each."""
    two = replace(cycles.H100, processors=2, hertz=1.0)
    kernel = cycles.Kernel(whole=1.0, masked=1.0, around=0.0, resident=1)
    assert cycles.seconds(kernel, [(2, 0), (1, 0), (0, 1), (2, 0), (4, 0)], 1, two) == 6, "the longest last"
    assert cycles.seconds(kernel, [(4, 0), (2, 0), (2, 0), (1, 0), (1, 0)], 1, two) == 5, "first"
    assert cycles.seconds(replace(kernel, around=1.0), [(4, 0)], 4, two) == 10


def test_steps_are_the_visited_tiles_in_the_order_of_launch(model: Any) -> None:
    tile = LaunchConfig(block_m=128, block_n=64, warps=4, stages=2)
    rows = model.steps(model.Tried("forward", 64, tile), "causal", 512)
    assert rows == [(6, 2), (4, 2), (2, 2), (0, 2)], "the last queries, which see most, first"
    assert model.steps(model.Tried("dkdv", 64, tile), "causal", 256) == [(1, 1), (1, 1), (0, 1), (0, 1)]
    assert sum(map(sum, model.steps(model.Tried("dq", 64, tile), "full", 512))) == 4 * 8
    window = model.steps(model.Tried("forward", 64, tile), "window", 4096)
    assert max(whole + masked for whole, masked in window) == (1024 + 128) // 64


@pytest.mark.parametrize("form", ["causal", "full", "window", "documents"])
def test_visible_pairs(form: str, model: Any) -> None:
    seen = model.visibility(form, 2048).dense(1, 2048, 2048)
    assert model.pairs(form, 2048) == int(seen.sum())


def test_loops_are_those_that_multiply() -> None:
    """The innermost ones; a wait that goes on behind the end and comes back is none."""
    sass = """
        /*0000*/ MOV R1, R2 ;
    .L_x_0:
        /*0010*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
    .L_x_1:
        /*0020*/ @P0 MUFU.EX2 R5, R6 ;
        /*0030*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2] ;
        /*0040*/ @!P0 BRA `(.L_x_5) ;
    .L_x_2:
        /*0050*/ HGMMA.64x128x16.F32.BF16 R88, R40, gdesc[UR4], R88 ;
        /*0060*/ STL [R1], R5 ;
        /*0070*/ LDGSTS.E.BYPASS.128 [R2], desc[UR30][R56.64] ;
        /*0080*/ @P1 BRA `(.L_x_0) ;
    .L_x_3:
        /*0090*/ MOV R1, R2 ;
        /*00a0*/ @P2 BRA `(.L_x_3) ;
        /*00b0*/ EXIT ;
    .L_x_5:
        /*00c0*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2] ;
        /*00d0*/ BRA `(.L_x_2) ;
    """
    (found,) = loops(sass)
    assert found == Loop(
        instructions=8, products={"64x64x16": 1, "64x128x16 of registers": 1}, exponentials=1, copies=1,
        spilled=1, waits=1,
    )  # fmt: skip
    assert found.flops(8) == 2 * 2 * 64 * (64 + 128) * 16 and found.narrowest == 64


@pytest.fixture(scope="module")
def reports(model: Any) -> Any:
    """Of the table's tiles for an H100, which test_triton_aot compiles too."""
    tiles = [model.Tried(kernel, d, model.ours(kernel, d)[0])
             for kernel in ("forward", *model.BACKWARD) for d in (64, 128)]  # fmt: skip
    return model.compiled(tiles)


def test_what_was_measured_is_foreseen(model: Any, reports: Any) -> None:
    """Within a sixth, by figures that were fitted to other kernels."""
    rows = [row for row in model.TABLES if row.whose == "ours"]
    assert len(rows) == 4
    for row in rows:
        assert model.foreseen(reports, row) == pytest.approx(row.tflops, rel=1 / 6), row


@pytest.mark.parametrize("d", [64, 128])
def test_ours_is_foreseen_to_reach_its_bars(d: int, model: Any, reports: Any) -> None:
    """Against FlashAttention-2's causal attention at 16k as published."""
    for (form, backward), bar in model.BARS.items():
        assert model.over_flash2(reports, d, form, backward=backward) >= bar, (form, backward)
