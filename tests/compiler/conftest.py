"""Training plans in a fraction of a second: operators timed once, this machine calibrated once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_once import captured_once, programs_once

from effcompile.estimate import operators
from effcompile.search.machine import AUTO, resolve


@pytest.fixture(scope="session")
def _calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which this machine's calibration lies."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCOMPILE_CACHE", str(folder))
        resolve(AUTO, []).keep_timings()
    return folder


@pytest.fixture(scope="module")
def _shared_captures() -> Iterator[None]:
    with captured_once():
        yield


#: The tests that read what each lever reaches alone. In the others no plan looks for it, a sixth of what they
#: compute.
_OF_LEVERS = ("lever", "third_party", "microbatch")


@pytest.fixture
def quick_planning(
    request: pytest.FixtureRequest, _calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The cache folder of these tests, which keep their operators' figures there."""
    if not any(word in request.module.__name__ for word in _OF_LEVERS):
        monkeypatch.setattr("effcompile.compiler.training.compile.lever_rows", lambda *_, **__: ((), []))
    measured = operators._seconds
    monkeypatch.setattr(operators, "_seconds", lambda call, budget, *others: measured(call, 0.0, *others))
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(_calibrated))
    return _calibrated


@pytest.fixture
def quick_training(quick_planning: Path, _shared_captures: None) -> Path:
    """As above; equal models with equal batches are captured once, and without what their forwards read of
    their configurations.
    """
    return quick_planning


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """A model is captured once for the plans that follow each other."""
    with programs_once():
        yield
