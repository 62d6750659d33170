"""Linears of few rows are timed on weights that no cache holds, and of a vocabulary's head a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from effcompile.backends.torch import measure
from effcompile.core.timing import median_seconds
from effcompile.machine import cold
from effcompile.machine.calibration import BackendPoints, Calibration
from effcompile.machine.hardware import this_hardware
from effcompile.machine.here import part_of, this_machine
from effcompile.machine.target import KernelCall

HEAD = KernelCall("linear/int4_groups", (1, 896, 151936, 32))


def test_caches_are_emptied_before_each_sample() -> None:
    done: list[str] = []
    median_seconds(lambda: done.append("call"), min_rounds=3, budget=0.0, before=lambda: done.append("empty"))
    warm, samples = done[:2], done[2:]
    assert warm == ["call"] * 2 and samples == ["empty", "call"] * 3


@pytest.mark.parametrize(("rows", "read"), [(1, True), (16, True), (17, False)])
def test_only_linears_of_few_rows_and_large_weights(
    rows: int, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(measure, "evict", lambda: emptied.append(1))
    for width in (64, 512):
        emptied.clear()
        assert measure.measure(KernelCall("linear/fp32", (rows, width, 512)), "eager", device="cpu")
        assert bool(emptied) is (read and width == 512)


def test_a_head_is_timed_by_some_of_its_columns() -> None:
    part, times = part_of(HEAD)
    m, k, n, group = part.dims
    assert (m, k, group) == (1, 896, 32) and n % 64 == 0 and n * k >= 1 << 24
    assert times * n == pytest.approx(151936)
    for whole in (
        KernelCall("linear/fp32", (1, 896, 4864)),  # small
        KernelCall("linear/fp32", (128, 896, 151936)),  # of many rows what it writes counts, too
        KernelCall("embedding/fp32", (1, 151936)),
    ):
        assert part_of(whole) == (whole, 1.0)


def test_its_price_is_that_of_the_whole_with_one_launch() -> None:
    asked: list[KernelCall] = []

    def timed(call: KernelCall) -> float:
        asked.append(call)
        return 1e-5 + 1e-9 * call.dims[2]

    points = BackendPoints(versions={}, overhead=1e-5)
    known = Calibration(
        machine=this_hardware(), date="", memory_bandwidth=1e10, peak_flops={}, backends={"ours": points}
    )
    target: Any = this_machine(known, {"ours": timed}, budget_seconds=9.0, priced_as=lambda name, _: name)
    seconds, _ = target.price("ours", HEAD)
    assert asked == [part_of(HEAD)[0]] and seconds == pytest.approx(1e-5 + 1e-9 * 151936)
    assert points.known(HEAD) == (True, seconds)


def test_its_memory_is_given_back() -> None:
    cold.evict()
    assert cold._buffer.cache_info().currsize == 1
    cold.forget()
    assert cold._buffer.cache_info().currsize == 0 and torch.ones(1).sum() == 1


def test_a_roof_is_of_the_best_rate_reached_a_large_linear_among_them() -> None:
    asked: list[KernelCall] = []

    def timed(call: KernelCall) -> float:
        asked.append(call)
        return call.flops / 2e12

    known = Calibration(machine=this_hardware(), date="", memory_bandwidth=1e10, peak_flops={"fp32": 1e11})
    target: Any = this_machine(known, {"torch-eager": timed}, budget_seconds=9.0)
    coded, plain = (KernelCall(f"linear/{held}", (8, 64, 64)) for held in ("int8_token", "fp32"))
    assert target.roof(coded) == pytest.approx(coded.flops / 2e12)
    assert target.roof(plain) == pytest.approx(plain.flops / 1e11), "its rate is known, and is not taken here"
    assert target.roof(coded) and [call.kernel for call in asked] == ["linear/int8_token"], "timed once"
    assert target.peak_flops == {"fp32": 1e11}, "what is not measured is not modelled by it"


def test_a_roof_of_a_dtype_that_nothing_reached_is_none() -> None:
    known = Calibration(machine=this_hardware(), date="", memory_bandwidth=1e10, peak_flops={"fp32": 1e11})
    target: Any = this_machine(known, {"torch-eager": lambda _: None}, budget_seconds=9.0)
    assert target.roof(KernelCall("linear/int8_token", (8, 64, 64))) == 0.0


@pytest.mark.parametrize(
    ("program", "read"),
    [
        (0, 0),
        (63 << 20, 0),
        (64 << 20, 64 << 20),
        (200 << 20, 128 << 20),
        (256 << 20, 256 << 20),
        (1 << 40, 256 << 20),
    ],
)
def test_a_program_pushes_out_what_it_cannot_keep(program: int, read: int) -> None:
    assert cold.pushed_out(program) == read
