"""Kernel times that a whole model contradicts are forgotten, so that one busy minute does not mislead every
later plan.
"""

from __future__ import annotations

from effcompile.compiler.borne_out import stale_timings
from effcompile.ir.figures import Candidate
from effcompile.machine.calibration import BackendPoints, Calibration
from effcompile.machine.hardware import this_hardware
from effcompile.machine.machines import load_target
from effcompile.search.machine import Machine


def machine() -> Machine:
    calibration = Calibration(
        machine=this_hardware(), date="2026-11-21", memory_bandwidth=1e10, peak_flops={"fp32": 1e11}
    )
    calibration.backends = {"onnxruntime": BackendPoints(), "openvino": BackendPoints()}
    return Machine(target=load_target("cpu-generic"), calibration=calibration)


def test_a_backend_that_is_far_faster_than_its_kernels_is_measured_again() -> None:
    here = machine()
    candidates = [
        Candidate(backend="onnxruntime", predicted_seconds=0.220, measured_seconds=0.040),
        Candidate(backend="openvino", predicted_seconds=0.041, measured_seconds=0.038),
    ]
    (note,) = stale_timings(here, candidates)
    assert str(note).startswith("onnxruntime: predicted 220 ms, measured 40.0 ms")
    assert here.calibration is not None
    assert set(here.calibration.backends) == {"openvino"}
    assert here.calibration.dirty


def test_what_was_not_built_is_left_alone() -> None:
    here = machine()
    assert stale_timings(here, [Candidate(backend="onnxruntime", predicted_seconds=9.0)]) == []
    assert here.calibration is not None
    assert not here.calibration.dirty
