"""Imports only go down; private torch APIs stand in one module."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "effcompile"

#: Lowest first. Packages of one row do not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("core",),
    ("ir",),
    ("machine",),
    ("ops",),
    ("sites", "sparse"),
    ("capture",),
    ("estimate", "planner"),
    ("schedules",),
    ("passes", "backends"),
    ("loader",),
    ("runtime",),
    ("search", "serving"),
    ("proof",),
    ("compiler",),
    ("report", "exports"),
    ("modes",),
    ("deferred", "dynamo", "console", "doctor"),
    ("bucketed", "as_module", "fallback", "arguments"),
    ("api",),
    ("runs", "hf_exporter"),
    ("cli", "__init__"),
    ("__main__",),
]
#: Underscored, yet the documented home of what is imported from there (TorchDispatchMode, tree_map).
DOCUMENTED = ("torch.utils._pytree", "torch.utils._python_dispatch")
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, nested imports too; `from a import b` counts as a and a.b."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def upward(file: Path) -> Iterator[str]:
    """What a file imports that is not below it."""
    mine = layer_of(file)
    assert mine in LEVEL, f"{mine} has no layer yet: give it a row in LAYERS"
    for line, module in imports(file):
        parts = module.split(".")
        if parts[0] != "effcompile" or len(parts) < 2 or parts[1] == mine or parts[1] not in LEVEL:
            continue
        if LEVEL[parts[1]] >= LEVEL[mine]:
            yield f"{file}:{line}: {mine} must not import {parts[1]}: imports only go down"


def test_imports_only_go_down() -> None:
    assert not [line for file in FILES for line in upward(file)]


def private(file: Path) -> Iterator[str]:
    """What a file has of torch's own."""
    for line, module in imports(file):
        own = module.startswith("torch.") and any(part.startswith("_") for part in module.split(".")[1:])
        if own and not module.startswith(DOCUMENTED):
            yield f"{file}:{line}: {module} belongs in torch_compat.py"
    for node in ast.walk(tree_of(file)):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id == "torch" and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield f"{file}:{node.lineno}: torch.{node.attr} belongs in torch_compat.py"


def test_private_torch_apis_stand_in_torch_compat() -> None:
    others = [file for file in FILES if not file.stem.startswith("torch_compat")]
    assert not [line for file in others for line in private(file)]


def imported(file: Path, modules: Collection[str]) -> set[str]:
    """Our modules that a file imports, for types too; `from package import module` is the module."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {place if place in modules else str(node.module) for place in inside.values()}
    return found & set(modules)


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in FILES
    }
    graph = {name: imported(file, modules) - {name} for name, file in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)  # CycleError names one


def test_every_layer_exists() -> None:
    """A renamed module must not leave its row behind."""
    there = {layer_of(file) for file in FILES}
    assert set(LEVEL) <= there, f"rows without a module: {sorted(set(LEVEL) - there)}"


def test_no_two_test_files_have_one_name() -> None:
    """pytest cannot import both, and the whole suite fails at collection; those in interpreted/ run in
    processes of their own.
    """
    names = [
        file.name for file in Path(__file__).parent.rglob("test_*.py") if file.parent.name != "interpreted"
    ]
    assert sorted(names) == sorted(set(names))
