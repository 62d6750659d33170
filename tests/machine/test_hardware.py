import math
import subprocess
import sys

import torch

from effcompile.machine.hardware import matmul_peak, package_versions, read_bandwidth, this_hardware


def test_rates_are_positive_and_finite():
    for rate in (read_bandwidth(2**20), matmul_peak(32)):
        assert math.isfinite(rate)
        assert rate > 0


def test_versions_are_of_what_is_imported():
    assert package_versions()["torch"] == torch.__version__


def test_the_machine_is_stable_and_named():
    assert this_hardware() == this_hardware()
    assert len(this_hardware().key) == 12
    assert this_hardware().cpu
    assert this_hardware().memory_bytes % 2**30 == 0


def test_knowing_the_machine_takes_no_torch():
    code = (
        "import sys; from effcompile.machine.calibration import *; load_or_none(); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_limit_on_the_instructions_is_another_machine(monkeypatch):
    """What kernels allocate, and how long they take, is kept under the machine's key."""
    plain = this_hardware()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert this_hardware().key != plain.key
    assert this_hardware().instructions.endswith("ONEDNN_MAX_CPU_ISA=AVX2")
