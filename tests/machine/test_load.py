"""Times that are taken while others use the machine are known as such, and taken again when it is quiet."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from effcompile.machine import busy_points, here, load
from effcompile.machine import calibration as store
from effcompile.machine.target import KernelCall

CALL = KernelCall("pointwise/fp32", (64,))


def spin(started: multiprocessing.synchronize.Event) -> None:
    started.set()
    while True:
        pass


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a system that pins processes to cores"
)
def test_work_beside_ours_is_seen() -> None:
    """Ours and three others on one core: repeats are as long as a turn of all four, now and then."""
    before, context = os.sched_getaffinity(0), multiprocessing.get_context("fork")
    started = [context.Event() for _ in range(3)]
    os.sched_setaffinity(0, {min(before)})
    others = [context.Process(target=spin, args=(event,), daemon=True) for event in started]
    try:
        for other, event in zip(others, started, strict=True):
            other.start()
            event.wait(20)
        assert max(load.spread() for _ in range(5)) > load.APART
    finally:
        for other in others:
            other.kill()
        os.sched_setaffinity(0, before)


def measured(seconds: float) -> Callable[[KernelCall], float]:
    return lambda call: seconds


def test_times_taken_on_a_busy_machine_are_taken_again_when_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the next process, where this one did not come to it, say that a version changed."""
    for module in (store, busy_points):
        monkeypatch.setattr(module, "busy", lambda: "load 9")
    found = store.calibrate({"torch": measured(0.5)}, quick=True)
    assert found.backends["torch"].busy == "load 9"
    note = busy_points.without_busy(found)
    # nothing better can be had now
    assert note and "still busy" in str(note) and found.backends["torch"].points
    for module in (store, busy_points, here):
        monkeypatch.setattr(module, "busy", lambda: "")
    note = busy_points.without_busy(found)
    assert (
        note
        and "taken again" in str(note)
        and "load 9" in str(note)
        and "torch" not in found.backends
        and found.dirty
    )
    kept, note = store.load_or_none(store.save(found, tmp_path / "calibration.json"))
    assert kept is not None and note is None
    assert busy_points.without_busy(found) is None
    target = here.this_machine(found, {"torch": measured(0.25)})
    assert (
        target.probe is not None and target.probe("torch", CALL) == 0.25 and not found.backends["torch"].busy
    )


def test_what_a_plan_times_itself_is_marked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "busy", lambda: "")
    found = store.calibrate({}, quick=True)
    monkeypatch.setattr(here, "busy", lambda: "load 3")
    target = here.this_machine(found, {"torch": measured(0.25)})
    assert target.probe is not None and target.probe("torch", CALL) == 0.25
    assert found.backends["torch"].busy == "load 3"


def test_the_mark_is_kept_on_disk(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(store, "busy", lambda: "load 9")
    path = store.save(store.calibrate({"torch": measured(0.5)}, quick=True), tmp_path / "calibration.json")
    assert store.load(path).backends["torch"].busy == "load 9"


@pytest.mark.parametrize("marked", [True, False])
def test_rates_taken_on_a_busy_machine_are_taken_again(monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """Also where nobody marked them: a product that does twice what the machine is said to reach gives them
    away.
    """
    monkeypatch.setattr(store, "busy", lambda: "load 9" if marked else "")
    monkeypatch.setattr(store, "read_bandwidth", lambda: 2e9)
    monkeypatch.setattr(store, "matmul_peak", lambda: 20e9)
    found = store.calibrate({})
    product = KernelCall("linear/fp32", (128, 768, 768))
    found.backends["torch"] = store.BackendPoints(
        points={product.kernel: [(product.dims, product.flops / 200e9)]}
    )
    monkeypatch.setattr(busy_points, "busy", lambda: "")
    monkeypatch.setattr(busy_points, "read_bandwidth", lambda: 21e9)
    monkeypatch.setattr(busy_points, "matmul_peak", lambda: 190e9)
    note = busy_points.without_busy(found)
    assert note and "machine's rates" in str(note) and "taken again" in str(note)
    assert (
        found.memory_bandwidth == 21e9 and found.peak_flops["fp32"] == pytest.approx(200e9) and not found.busy
    )
    assert found.backends["torch"].points and busy_points.without_busy(found) is None
