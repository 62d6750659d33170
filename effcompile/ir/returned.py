"""What a call returns, as data in its plan: whoever opens an artifact without the model gives the same
structure back.

A class of outputs that only the model's package has (ModelOutput, a dataclass) comes back as a
`ReturnedRecord` with these names.
"""

from __future__ import annotations

import ast
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from effcompile.core.errors import FormatError, clipped
from effcompile.core.types import Value

Kind = Literal["tensor", "size", "plain", "list", "tuple", "dict", "namedtuple", "record"]
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One place of what a call returns.

    Attributes:
        kind: the next tensor, a number that follows from the inputs' sizes, a plain value, or what holds
            `parts`.
        formula: of a size, in the names of the inputs' free axes.
        value: of a plain one.
        keys: of the parts of a dict, named tuple or record. absent: further fields of a record, which are
            None.
        parts: what it holds, in order.
    """

    kind: Kind
    formula: str = ""
    value: bool | int | float | str | None = None
    keys: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    parts: tuple[Returned, ...] = ()

    def tensors(self) -> int:
        """How many tensors it is made of."""
        return (self.kind == "tensor") + sum(part.tensors() for part in self.parts)

    def built(self, tensors: Sequence[Value], sizes: Mapping[str, int]) -> Any:
        """The structure around a call's tensors at these sizes of the inputs' axes."""
        return self._built(iter(tensors), sizes)

    def _built(self, tensors: Iterator[Value], sizes: Mapping[str, int]) -> Any:
        match self.kind:
            case "tensor":
                return next(tensors)
            case "size":
                return value_of(self.formula, sizes)
            case "plain":
                return self.value
        parts = [part._built(tensors, sizes) for part in self.parts]
        match self.kind:
            case "list":
                return parts
            case "tuple":
                return tuple(parts)
            case "dict":
                return dict(zip(self.keys, parts, strict=True))
            case "namedtuple":
                return namedtuple("Outputs", self.keys, rename=True)(*parts)
        return ReturnedRecord(dict(zip(self.keys, parts, strict=True)), self.absent)


class ReturnedRecord(dict[str, Any]):
    """Named outputs, as attributes, by name, and in order: `out.logits`, `out["logits"]`, `out[0]`."""

    def __init__(self, values: Mapping[str, Any], absent: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.__dict__.update(dict.fromkeys(absent))
        self.__dict__.update(values)

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there, in order."""
        return tuple(self.values())


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}  # fmt: skip


def value_of(formula: str, sizes: Mapping[str, int]) -> int | float:
    """A formula of a saved plan at these sizes: arithmetic alone, for a plan may be anybody's.

    Raises:
        FormatError: it is anything else.
    """
    try:
        found = _evaluated(ast.parse(formula, mode="eval").body, sizes)
    except (SyntaxError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise FormatError(
            f"The plan's formula {clipped(formula, 120)!r} is no arithmetic of sizes. Plan again."
        ) from error
    return int(found) if found == int(found) else float(found)


def _evaluated(node: ast.AST, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) < _LARGEST:
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluated(operand, sizes))
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=2 | 3 as power)):
            return _evaluated(base, sizes) ** power
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluated(left, sizes), _evaluated(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _FUNCTIONS[name](*(_evaluated(arg, sizes) for arg in args))
    raise ValueError("not arithmetic")
