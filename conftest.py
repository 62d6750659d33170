"""Tests and the examples of the docs measure briefly, into a cache of their own, never into the user's; the
workers of a run share it.
"""

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast inputs are drawn, and how many are put aside, says how busy the machine is: no test fails for that.
settings.register_profile(
    "effcompile", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("effcompile")


def pytest_configure() -> None:
    """Two workers have two cores: pools of compilers of Inductor's own would load torch again for each, and
    in all that tests start.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Inductor's cache takes what it generated for one capability for another, and computes wrong
        cache = Path(tempfile.gettempdir()) / f"torchinductor_effcompile_{capability}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """What is left goes with the process: pytest would look through it ten times, which takes 18 seconds of
    one that ran half of the suite. Python itself does once, or nanobind tells of what has leaked.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    cache = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "calibration"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCOMPILE_CACHE", str(cache))
        # tiny models, two workers: times say little, no second solve
        patch.setattr("effcompile.ir.plan.FAR_APART", 1e9)
        patch.setattr("effcompile.core.timing.PATIENCE", 0.02)
        patch.setattr("effcompile.passes.training.checkpoint.SECONDS_PER_BLOCK", 0.05)
        patch.setattr("effcompile.proof.training.timed._TIMING_SECONDS", 0.0)
        patch.setattr("effcompile.compiler.measure._MOST", 4)
        # a test's plan is its own, and not another one's
        patch.setattr("effcompile.compiler.training.known.LEAST_NODES", 1e9)
        yield
