"""Whether a comparison of sizes, as torch.export writes its guards, holds wherever an artifact is called, or
in one call.

Both sides are polynomials in the names of free axes: `(batch*seq) % batch == 0` is 0 == 0 where equal names
are equal sizes, though torch has a symbol for each tensor's. Loads without torch.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

#: How torch.export says what must be so of sizes.
_SIZE = re.compile(r"L(?P<place>(\['\w+'\]|\[\d+\])+)\.size\(\)\[(?P<axis>\d+)\]")

#: Factors, in order → how often their product is in the sum; a number has no factors.
Polynomial = dict[tuple[str, ...], int]
Bounds = Mapping[str, tuple[int, int | None]]


def taken(
    guards: Sequence[str], sizes: Mapping[str, Sequence[int | str]], bounds: Bounds
) -> tuple[Bounds, tuple[str, ...]] | None:
    """The least and greatest sizes that an artifact takes, and what else must hold in each call, in names of
    axes; None where its example's sizes alone are known to be right.

    Tracing assumes every free size to be at least 2; an axis is 1 where all guards hold there, too.

    `sizes`: of the tensor at a place (`['batch']['mask']`). Guards of plain values follow, for these are
    fixed.
    """
    named = [_in_names(guard, sizes) for guard in guards if ".size()" in guard]
    asked = tuple(guard for guard in named if not _follows(guard, bounds))
    if not all(_is_arithmetic(guard, bounds) for guard in asked):
        return None
    always = [guard for guard in named if guard not in asked]
    ones = {name: (1, high) for name, (low, high) in bounds.items() if low <= 2}
    ones = {n: b for n, b in ones.items() if all(_follows(g, {**bounds, n: b}) for g in always)}
    together = {**bounds, **ones}
    return together if all(_follows(guard, together) for guard in always) else bounds, asked


def holds(guard: str, sizes: Mapping[str, int]) -> bool:
    """Whether what `taken` left to be asked is so at these sizes; what nobody can read is not."""
    try:
        return bool(_value(ast.parse(guard, mode="eval").body, sizes))
    except (*_NO_TEXT, _UntoldError, ZeroDivisionError):
        return False


#: What Python's parser raises of a text that is no expression, or too deep a one.
_NO_TEXT = (SyntaxError, ValueError, RecursionError, MemoryError)


def _in_names(guard: str, sizes: Mapping[str, Sequence[int | str]]) -> str:
    """The guard with names and numbers for sizes; what is none of an input stays as it is."""

    def named(found: re.Match[str]) -> str:
        axes, axis = sizes.get(found["place"], ()), int(found["axis"])
        size = str(axes[axis]) if axis < len(axes) else found[0]
        return size if size.isidentifier() or size.isdecimal() else f"({size})"

    return _SIZE.sub(named, guard)


def _follows(guard: str, bounds: Bounds) -> bool:
    try:
        return _holds(ast.parse(guard, mode="eval").body, bounds)
    except (*_NO_TEXT, _UntoldError):
        return False


def _is_arithmetic(guard: str, names: Collection[str]) -> bool:
    """Whether `holds` can tell of it, at sizes of these names."""
    try:
        _value(ast.parse(guard, mode="eval").body, dict.fromkeys(names, 2))
    except ZeroDivisionError:
        return True
    except (*_NO_TEXT, _UntoldError):
        return False
    return True


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    """Of an expression in whole numbers; of a comparison 1 where it holds."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=of):
            return -_value(of, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _EXACT:
            return _EXACT[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _EXACT:
            return _EXACT[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.BoolOp(op=op, values=parts):
            return (any if isinstance(op, ast.Or) else all)([_value(part, sizes) for part in parts])
        case ast.Call(func=ast.Name(id="max" | "Max" | "min" | "Min" as name), args=[first, second]):
            return (max if name.lower() == "max" else min)(_value(first, sizes), _value(second, sizes))
    raise _UntoldError


_EXACT: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class _UntoldError(Exception):
    """Arithmetic that is not done here."""


def _holds(tree: ast.expr, bounds: Bounds) -> bool:
    if isinstance(tree, ast.BoolOp):
        parts = (_holds(part, bounds) for part in tree.values)
        return any(parts) if isinstance(tree.op, ast.Or) else all(parts)
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        raise _UntoldError
    apart = _sum(_read(tree.left, bounds), _read(tree.comparators[0], bounds), -1)
    apart = _without_common(apart)
    low, high = _least(apart, bounds), -_least(_sum({}, apart, -1), bounds)
    match tree.ops[0]:
        case ast.GtE():
            return low >= 0
        case ast.Gt():
            return low > 0
        case ast.LtE():
            return high <= 0
        case ast.Lt():
            return high < 0
        case ast.NotEq():
            return low > 0 or high < 0
        case ast.Eq():
            return low == high == 0
    return False


def _read(tree: ast.expr, bounds: Bounds) -> Polynomial:
    match tree:
        case ast.Constant(value=int(number)):
            return _number(number)
        case ast.Name(id=name):
            return {(name,): 1}
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(_read(left, bounds), op, _read(right, bounds))
        case ast.Call(func=ast.Name(id="max" | "Max"), args=[first, second]):
            a, b = _read(first, bounds), _read(second, bounds)
            if _least(_sum(a, b, -1), bounds) >= 0:
                return a
            if _least(_sum(b, a, -1), bounds) >= 0:
                return b
    raise _UntoldError


def _arithmetic(a: Polynomial, op: ast.operator, b: Polynomial) -> Polynomial:
    match op:
        case ast.Add() | ast.Sub():
            return _sum(a, b, 1 if isinstance(op, ast.Add) else -1)
        case ast.Mult():
            found: Polynomial = {}
            for factors, count in a.items():
                found = _sum(found, {tuple(sorted(factors + f)): count * n for f, n in b.items()}, 1)
            return found
        case ast.FloorDiv() | ast.Mod() if len(b) == 1:
            ((divisor, by),) = b.items()
            whole = _divided(a, divisor, by)
            return whole if isinstance(op, ast.FloorDiv) else {}
    raise _UntoldError


def _divided(a: Polynomial, divisor: tuple[str, ...], by: int) -> Polynomial:
    """What is left of each product; none may leave a rest."""
    found: Polynomial = {}
    for factors, count in a.items():
        left = Counter(factors)
        left.subtract(divisor)
        if count % by or any(n < 0 for n in left.values()):
            raise _UntoldError
        found[tuple(sorted(left.elements()))] = count // by
    return found


def _sum(a: Polynomial, b: Polynomial, times: int) -> Polynomial:
    total = {factors: a.get(factors, 0) + times * b.get(factors, 0) for factors in {**a, **b}}
    return {factors: count for factors, count in total.items() if count}


def _without_common(a: Polynomial) -> Polynomial:
    """Of the same sign, as sizes are positive: without the factors that are in every product."""
    common = [Counter(factors) for factors in a] or [Counter[str]()]
    least = common[0]
    for each in common[1:]:
        least = least & each
    return _divided(a, tuple(least.elements()), 1)


def _number(value: int) -> Polynomial:
    return {(): value} if value else {}


def _least(polynomial: Polynomial, bounds: Bounds) -> float:
    """What it is not below, sizes being positive."""
    total = 0.0
    for factors, count in polynomial.items():
        ends = [bounds.get(name, (0, None)) for name in factors]
        sizes = [low if count > 0 else math.inf if high is None else high for low, high in ends]
        total += count * math.prod(sizes)
    return total
