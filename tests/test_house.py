"""The measures that the house is held to, counted on the syntax trees as `benchmarks/house.py`
prints them.
"""

from __future__ import annotations

import ast
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
        (tmp_path / f"{name}.py").write_text(
            "class Case: ...\nclass _Own: ...\ndef f(a, b, c, d, e, f, g, h, i: Any): ...\n" + "\n" * 400
        )
    found = house.counted(tmp_path)
    assert len(found.long_files) == len(found.wide_functions) == len(found.any_functions) == 2
    assert len(found.shared_names) == 1 and found.shared_names[0].startswith("Case: ")


def _asked_of(source: str) -> list[str]:
    """Classes of passes that code asks objects to be of, or whose attributes it asks for by name."""
    tree = ast.parse(source)
    named = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("effcompile.passes")
    } - _NO_PASSES
    asking = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "getattr", "hasattr")
    ]
    return [
        ast.unparse(call)
        for call in asking
        if named & {ast.unparse(part) for arg in call.args for part in ast.walk(arg)}
    ]


#: Values that passes propose, which are told apart by their class.
_NO_PASSES = {"StepChoice", "Choice", "Declined"}


def test_no_pass_is_asked_of_what_class_it_is() -> None:
    """What the compiler wants to know of a pass, its contract says."""
    package = BENCHMARK.parents[1] / "effcompile"
    found = {
        str(file): asked
        for room in ("compiler", "search", "runtime", "proof", "planner")
        for file in (package / room).rglob("*.py")
        if (asked := _asked_of(file.read_text(encoding="utf-8")))
    }
    assert not found
    assert _asked_of(
        "from effcompile.passes.training.pipeline import Pipeline\nif isinstance(each, Pipeline): ...\n"
    )
