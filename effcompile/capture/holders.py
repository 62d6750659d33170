"""What holds the values that a forward reads: objects with a dictionary or slots, arrays, functions, the
environment.
"""

from __future__ import annotations

import array
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy

#: Plain memory that may be written to.
Memory = numpy.ndarray | bytearray | array.array  # type: ignore[type-arg]
#: What a getter reads, a mapping, a sequence or a cell, and how: the values that stand there now.
Source = Any
Getter = Callable[[Source], Collection[object]]
#: Of larger memory evenly spread elements are compared, as many as so many bytes have.
_WHOLE = 16 << 10


def slots_of(value: object) -> tuple[str, ...]:
    """Names of the slots of an object that have a value."""
    members = dict.fromkeys(
        n
        for kind in type(value).__mro__
        for n, d in vars(kind).items()
        if isinstance(d, MemberDescriptorType)
    )
    return tuple(name for name in members if not name.startswith("__") and hasattr(value, name))


def attributes_of(value: object) -> dict[str, object]:
    """What an object holds by name."""
    return {
        **(vars(value) if hasattr(value, "__dict__") else {}),
        **{name: getattr(value, name) for name in slots_of(value)},
    }


def contents(memory: Memory) -> bytes:
    """The bytes of an array, or of its evenly spread elements where it is large."""
    if not isinstance(memory, numpy.ndarray):
        return bytes(memory)
    if memory.dtype.hasobject:
        return repr(memory).encode()
    flat = memory.reshape(-1)
    return flat[:: max(1, memory.nbytes // _WHOLE)].tobytes()


def defaults_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """(argument, value) of those that a call may leave out."""
    code, given = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(positional[len(positional) - len(given) :], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def parts_of(function: FunctionType) -> tuple[object, ...]:
    """What may be replaced of a function that stays the same object."""
    return function.__code__, function.__defaults__, function.__kwdefaults__


def in_environment(names: Sequence[str]) -> tuple[str | None, ...]:
    """Environment variables, equal ones as one object."""
    return tuple(None if (value := os.environ.get(name)) is None else sys.intern(value) for name in names)


def file_of(kind: type) -> str:
    """The file of a class's Python module; empty for one that was typed in."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def is_function(value: object) -> bool:
    """Whether a value is called without holding anything that its caller would set."""
    return isinstance(
        value,
        FunctionType | BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType | type | ModuleType,
    )


def getter(keys: tuple[str, ...]) -> Getter:
    """The values at these keys, as a tuple also where there are fewer than two."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda held: (held[keys[0]],)) if keys else (lambda _: ())


def mapped(table: Mapping[Any, object]) -> Collection[object]:
    """The values of a mapping."""
    return table.values()


def in_cell(cell: Any) -> tuple[object]:
    """The value of a variable of an enclosing function."""
    return (cell.cell_contents,)


def in_context(variable: ContextVar[object]) -> tuple[object]:
    """The value of a variable in the context of the call."""
    return (variable.get(None),)


def in_thread(keys: Sequence[str]) -> Getter:
    """The values under these names that the calling thread has in a threading.local."""
    return lambda local: tuple(vars(local).get(key) for key in keys)
