"""The structure of what a captured model returns, as plain data for its plan."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree

from effcompile.core.errors import FormatError
from effcompile.ir.export import sizes_of
from effcompile.ir.program import Output, Program, Size, evaluated
from effcompile.ir.returned import Kind, Returned, value_of

#: A plan nests no deeper; outputs of transformers have five levels since 5.24.
_DEEPEST = 8
_CONTAINERS: dict[Any, Kind] = {
    list: "list", tuple: "tuple", dict: "dict", collections.OrderedDict: "dict",
    collections.namedtuple: "namedtuple",
}  # fmt: skip


def returned_of(program: Program) -> Returned | None:
    """What `program` returns; None where a plan cannot say it: containers in containers, keys that are no
    texts, odd formulas.
    """
    spec = program.module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    kinds = program.returned or [Output.TENSOR] * len(program.outputs)
    made = _returned(spec, (_leaf(kind) for kind in kinds))
    places, sizes = list(_places(made, 1)), sizes_of(program)
    told = all(depth <= _DEEPEST and len(place.keys) in (0, len(place.parts)) for depth, place in places)
    keyed = all(
        place.keys or not place.parts for _, place in places if place.kind in ("dict", "namedtuple", "record")
    )
    return made if told and keyed and all(_followed(place.formula, sizes) for _, place in places) else None


def _returned(spec: pytree.TreeSpec, leaves: Iterator[Returned]) -> Returned:
    if spec.is_leaf():
        return next(leaves)
    parts = tuple(_returned(child, leaves) for child in spec.children())
    kind, keys = _CONTAINERS.get(spec.type, "record"), _keys(spec, len(parts))
    absent = tuple(name for name in _fields(spec) if name not in keys)
    return Returned(kind=kind, parts=parts, keys=() if kind in ("list", "tuple") else keys, absent=absent)


def _keys(spec: pytree.TreeSpec, count: int) -> tuple[str, ...]:
    """Names of the parts, where what holds them names them by texts."""
    found: Any = getattr(spec.context, "_fields", spec.context)  # a named tuple's class
    named = isinstance(found, Sequence) and not isinstance(found, str) and len(found) == count
    return tuple(found) if named and all(isinstance(name, str) for name in found) else ()


def _fields(spec: pytree.TreeSpec) -> list[str]:
    return [field.name for field in fields(spec.type)] if is_dataclass(spec.type) else []


def _leaf(kind: object) -> Returned:
    if kind is Output.TENSOR:
        return Returned(kind="tensor")
    if isinstance(kind, Size):
        return Returned(kind="size", formula=kind.formula)
    return Returned(kind="plain", value=kind if isinstance(kind, bool | int | float | str) else None)


def _places(made: Returned, depth: int) -> Iterator[tuple[int, Returned]]:
    """Every place of a structure, and how deep it is."""
    yield depth, made
    for part in made.parts:
        yield from _places(part, depth + 1)


def _followed(formula: str, sizes: dict[str, int]) -> bool:
    """Whether who opens the plan finds what we find."""
    if not formula:
        return True
    try:
        return value_of(formula, sizes) == evaluated(formula, sizes)
    except FormatError:
        return False
