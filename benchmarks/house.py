"""Counts what the house is measured by, on the syntax trees: long files, wide functions, `Any` in signatures,
names with several homes.

    python benchmarks/house.py            the counts
    python benchmarks/house.py --list     with each place

A signature counts once per annotation that names `Any`: each parameter, and the result. Kernels
(backends/triton/kernels) take what the GPU's launch gives them and are left out of the count of parameters.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "effcompile"
LONG_FILE, WIDE_FUNCTION = 400, 9
KERNELS = PACKAGE / "backends" / "triton" / "kernels"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What was counted; each place as `file:line name`."""

    lines: int
    long_files: tuple[str, ...]
    wide_functions: tuple[str, ...]
    any_annotations: tuple[str, ...]
    any_functions: tuple[str, ...]
    shared_names: tuple[str, ...]


def counted(package: Path = PACKAGE) -> House:
    """Read all files of a package."""
    lines, long_files, wide, annotations, functions = 0, [], [], [], []
    homes: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        length = len(text.splitlines())
        lines += length
        name = str(path.relative_to(package.parent))
        if length > LONG_FILE:
            long_files.append(f"{name} {length}")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
        for function in _functions(tree):
            place = f"{name}:{function.lineno} {function.name}"
            if KERNELS not in path.parents and len(_parameters(function)) >= WIDE_FUNCTION:
                wide.append(f"{place} {len(_parameters(function))}")
            vague = [place for annotation in _annotations(function) if _names_any(annotation)]
            annotations += vague
            functions += vague[:1]
    return House(
        lines=lines,
        long_files=tuple(long_files),
        wide_functions=tuple(wide),
        any_annotations=tuple(annotations),
        any_functions=tuple(functions),
        shared_names=tuple(
            f"{kind}: {', '.join(files)}" for kind, files in sorted(homes.items()) if len(files) > 1
        ),
    )


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def _parameters(function: Function) -> list[ast.arg]:
    """All named parameters but self and cls; `*rest` and `**options` count as one each."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *(a for a in (spec.vararg, spec.kwarg) if a)]
    return [a for index, a in enumerate(named) if not (index == 0 and a.arg in ("self", "cls"))]


def _annotations(function: Function) -> Iterator[ast.expr]:
    for parameter in _parameters(function):
        if parameter.annotation is not None:
            yield parameter.annotation
    if function.returns is not None:
        yield function.returns


def _names_any(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def main() -> None:
    house = counted()
    places = "--list" in sys.argv
    for title, found in (
        (f"files over {LONG_FILE} lines", house.long_files),
        (f"functions with {WIDE_FUNCTION} or more parameters, kernels aside", house.wide_functions),
        ("annotations of parameters and results that name Any", house.any_annotations),
        ("functions whose signature names Any", house.any_functions),
        ("names of classes with several homes", house.shared_names),
    ):
        print(f"{len(found):6,}  {title}")
        if places:
            print(*(f"          {place}" for place in found), sep="\n")
    print(f"{house.lines:6,}  lines in the package")


if __name__ == "__main__":
    main()
