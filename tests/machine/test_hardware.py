import math
import os
import subprocess
import sys

import psutil
import pytest
import torch

from effcompile.machine.hardware import matmul_peak, package_versions, read_bandwidth, this_hardware


def test_rates_are_positive_and_finite():
    for rate in (read_bandwidth(2**20), matmul_peak(32)):
        assert math.isfinite(rate)
        assert rate > 0


def test_versions_are_of_what_is_imported():
    # a wheel of PyPI leaves "+cu130" out
    assert torch.__version__.startswith(package_versions()["torch"])


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


@pytest.mark.parametrize(
    ("asked", "torchs", "threads"),
    [
        ("1", None, 1),  # torch is not loaded
        ("3", None, 3),
        ("", None, "cores"),
        ("0", None, "cores"),
        ("many", None, "cores"),
        ("3", 3, 3),
        ("3", 1, 1),  # torch.set_num_threads(1), whatever the environment says
        ("", 1, 1),
        ("", "cores", "cores"),
        ("", "physical", "cores"),  # torch's own choice
    ],
)
def test_threads_are_part_of_the_machine(monkeypatch, asked, torchs, threads):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    number = {"cores": 10, "physical": 5}
    if torchs is None:
        monkeypatch.delitem(sys.modules, "torch")
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: number.get(torchs, torchs))
    found = this_hardware()
    assert (found.cores, found.threads) == (10, number.get(threads, threads))


def test_another_number_of_threads_is_another_machine(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = this_hardware()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert one.key != this_hardware().key
    assert this_hardware().cores <= (os.cpu_count() or 1)
