"""Tests measure kernels into a cache of their own, never into the user's; the workers of one run share it."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How fast inputs are drawn, and how many are put aside, says how busy the machine is: no test fails for that.
settings.register_profile("effcompile", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.load_profile("effcompile")


@pytest.fixture(scope="session", autouse=True)
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str = "master") -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    cache = (root if worker_id == "master" else root.parent) / "calibration"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCOMPILE_CACHE", str(cache))
        patch.setattr("effcompile.ir.plan.FAR_APART", 1e9)  # tiny models, two workers: times say little, no second solve
        yield
