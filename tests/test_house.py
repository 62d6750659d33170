"""The measures that the house is held to, counted on the syntax trees as `benchmarks/house.py` prints them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["house"] = module
    spec.loader.exec_module(module)
    return module


def test_the_package_is_within_its_measures(house: ModuleType) -> None:
    found = house.counted()
    assert not found.shared_names
    assert len(found.wide_functions) <= 15 and len(found.any_annotations) <= 350


def test_what_is_counted_is_seen(house: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class Case: ...\nclass _Own: ...\ndef f(a, b, c, d, e, f, g, h, i: Any): ...\n" + "\n" * 400)
    found = house.counted(tmp_path)
    assert len(found.long_files) == len(found.wide_functions) == len(found.any_functions) == 2
    assert len(found.shared_names) == 1 and found.shared_names[0].startswith("Case: ")
