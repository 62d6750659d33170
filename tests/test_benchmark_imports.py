"""Benchmarks name what the package has: they are run seldom, and what they import moves."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in (
        node for node in found if node.module is not None and node.module.split(".")[0] == "effcompile"
    ):
        assert node.module is not None
        module = importlib.import_module(node.module)
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            there = hasattr(module, alias.name) or (hasattr(module, "__path__") and find_spec(submodule))
            assert there, f"{file}:{node.lineno}: {submodule}"
