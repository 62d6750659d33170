"""What holds the values that a forward reads: objects with a dictionary or slots, arrays, functions, the environment."""

from __future__ import annotations

import array
import os
import sys
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodDescriptorType, ModuleType, WrapperDescriptorType

import numpy

#: Plain memory that may be written to.
Memory = numpy.ndarray | bytearray | array.array  # type: ignore[type-arg]
#: Of larger memory evenly spread elements are compared, as many as so many bytes have.
_WHOLE = 16 << 10


def slots_of(value: object) -> tuple[str, ...]:
    """Names of the slots of an object that have a value."""
    members = dict.fromkeys(n for kind in type(value).__mro__ for n, d in vars(kind).items() if isinstance(d, MemberDescriptorType))
    return tuple(name for name in members if not name.startswith("__") and hasattr(value, name))


def attributes_of(value: object) -> dict[str, object]:
    """What an object holds by name."""
    return {**(vars(value) if hasattr(value, "__dict__") else {}), **{name: getattr(value, name) for name in slots_of(value)}}


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
    return isinstance(value, FunctionType | BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType | type | ModuleType)
