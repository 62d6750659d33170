"""Which names the code behind a model's forward reads: attributes, globals, and variables of enclosing
functions.

Found in the byte code, from the forward of every module on: through the functions, methods and hooks that it
names. That is more than one call executes, never less than it names, so that an attribute that no code names
need not be guarded.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from effcompile.capture.config_reads import ConfigReads
from effcompile.capture.holders import attributes_of, defaults_of, is_function
from effcompile.capture.whose_code import (
    INSTALLED,
    OURS,
    STANDARD,
    TORCH,
    is_installed,
    is_of_torch,
    is_own,
    is_plain_code,
)

#: Code that names these may read attributes whose names are made at run time.
_BY_NAME = frozenset({"vars", "__dict__", "attrgetter", "__getattribute__"})
#: Code that names these may keep something in a container, or under a name made at run time.
_CHANGING = frozenset(
    {"append", "appendleft", "extend", "insert", "update", "setdefault", "add", "setattr", "__setattr__"}
)
#: Of an object whose class has one of these, all attributes are watched.
FINDERS = ("__getattr__", "__getattribute__")
#: What loads a name: of an attribute, a global, a variable of an enclosing function.
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
#: Methods with two underscores on either side that no forward calls by what it writes.
_NOT_OF_A_CALL = frozenset(
    f"__{name}__"
    for name in (
        "init",
        "new",
        "post_init",
        "init_subclass",
        "class_getitem",
        "repr",
        "str",
        "setattr",
        "delattr",
        "del",
        "reduce",
        "reduce_ex",
    )
)
#: Of a container, so many items are looked into.
LONGEST = 10_000
_LEAVES = bool | int | float | complex | str | bytes | None | torch.Tensor | torch.dtype | torch.device
#: What stands between `getattr` and its second argument where that is a constant.
_OPERANDS = ("LOAD_FAST", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "PUSH_NULL")
_LAYERS = f"{TORCH}nn/modules/"


@dataclass(slots=True, kw_only=True)
class Reads:
    """What the code behind a forward names.

    Attributes:
        names: of attributes, and strings (of getattr, of keys).
        by_name: whether code of the model's own classes reads attributes by names made at run time.
        variables: the globals that it loads, by the name of their Python module: (namespace, names).
        cells: variables of enclosing functions: (function's name, variable's name) → cell.
        kinds: the classes whose methods it may call, of modules and of other objects.
        functions: those of the user's own code, whose defaults and attributes are values, too.
        environment: strings in code that reads the environment.
        used: names that are read for more than to count them up. stored: attributes that the user's own code
            sets.
        keeps: whether it may keep something: it sets attributes or items, or names what changes a container.
        minds_gradients: whether the forward was seen to be another one where gradients are enabled.
        configurations: what of the model's configurations was read.
    """

    names: set[str] = field(default_factory=lambda: {"forward", "__call__"})
    by_name: bool = False
    variables: dict[str, tuple[Mapping[str, Any], set[str]]] = field(default_factory=dict)
    cells: dict[tuple[str, str], CellType] = field(default_factory=dict)
    kinds: dict[type, None] = field(default_factory=dict)
    functions: list[FunctionType] = field(default_factory=list)
    environment: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    keeps: bool = False
    minds_gradients: bool = False
    configurations: ConfigReads = field(default_factory=ConfigReads)


def reads_of(model: nn.Module, *beside: object, configurations: ConfigReads | None = None) -> Reads:
    """What the forward of a model, what is called beside it (a loss), and all that they name read."""
    walk = _Walk(model)
    for value in beside:
        walk.reach(value)
    walk.run()
    return replace(walk.reads, configurations=configurations or ConfigReads())


class _Walk:
    """Follows functions from the model's modules on, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.reads = Reads()
        self._seen: set[int] = set()
        self._todo: list[FunctionType] = []
        self._looked_up: set[tuple[type, str]] = set()
        self._reached: dict[int, object] = {}
        for module in model.modules():
            self._add_object(module)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self._follow(hook)

    def run(self) -> None:
        self._methods()
        while self._todo:
            self._read(self._todo.pop())
            if not self._todo:
                self._methods()

    def _add_object(self, value: object) -> None:
        """Follow what an object's class makes of a call, and what it holds."""
        self._add_class(type(value))
        for held in attributes_of(value).values():
            self.reach(held)

    def reach(self, value: object) -> None:
        """Follow what a held value leads to: functions, and objects of the user's own classes, in containers
        of them too.
        """
        if isinstance(value, _LEAVES) or id(value) in self._reached:
            return
        self._reached[id(value)] = value
        self._follow(value)
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._add_object(module)
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            for item in list(value.values() if isinstance(value, Mapping) else value)[:LONGEST]:
                self.reach(item)
        elif not is_function(value) and is_own(type(value)):
            self._add_object(value)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if (
                base not in self.reads.kinds
                and base is not object
                and base is not nn.Module
                and not is_plain_code(base)
            ):
                self.reads.kinds[base] = None
                for held in vars(base).values() if is_own(base) else ():
                    if not is_function(held):  # descriptors, and values of the class
                        self.reach(held)

    def _methods(self) -> None:
        """Follow the methods and properties that are named anywhere."""
        for kind in list(self.reads.kinds):
            implied = (
                {name for name in vars(kind) if name.startswith("__") and name not in _NOT_OF_A_CALL}
                if is_own(kind)
                else set()
            )
            for name in (self.reads.names | implied) & vars(kind).keys():
                if (kind, name) not in self._looked_up:
                    self._looked_up.add((kind, name))
                    self._follow(vars(kind)[name])

    def _follow(self, value: object) -> None:
        """Functions are read; what wraps one leads to it."""
        if isinstance(value, FunctionType):
            if id(value) not in self._seen and _is_read(value.__code__.co_filename):
                self._seen.add(id(value))
                self._todo.append(value)
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            self._follow(value.__func__)
            if isinstance(value, MethodType) and not isinstance(value.__self__, (nn.Module, type)):
                self._add_class(type(value.__self__))
                self.reach(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.reach(part)
        elif isinstance(value, property):
            self._follow(value.fget)
        elif isinstance(value, functools.cached_property):
            self._follow(value.func)

    def _read(self, function: FunctionType) -> None:
        code = function.__code__
        found = _names_in(code)
        self.reads.names |= found.attributes
        self.reads.used |= found.used
        if not is_installed(code.co_filename) and not code.co_filename.startswith(OURS):
            self.reads.functions.append(function)
            self.reads.stored |= found.stored
            self.reads.keeps |= found.keeps
            for _, value in defaults_of(function):
                self.reach(value)
            if found.attributes & {"environ", "getenv"}:
                values = map(function.__globals__.get, found.variables)
                self.reads.environment |= found.attributes | {
                    value for value in values if isinstance(value, str)
                }
        self._functions_of_torch(map(function.__globals__.get, found.variables), found.attributes)
        if not code.co_filename.startswith(TORCH):
            self.reads.by_name |= found.by_name and code.co_name not in FINDERS
            self._variables(function, found.variables, found.attributes)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if (value := _content(cell)) is not None:
                self._follow(value)
                if not is_installed(code.co_filename):
                    self.reach(value)
                    self.reads.cells[function.__qualname__, name] = cell

    def _functions_of_torch(self, spaces: Iterable[object], attributes: frozenset[str]) -> None:
        """Functions of torch's own Python modules that code names: another may be put there
        (`F.scaled_dot_product_attention = ...`).
        """
        todo, seen = [*spaces], set[int]()
        while todo:
            space = todo.pop()
            if (
                id(space) in seen
                or not isinstance(space, ModuleType)
                or not (getattr(space, "__file__", None) or "").startswith(TORCH)
            ):
                continue
            seen.add(id(space))
            held = vars(space)
            there = attributes & held.keys()
            todo += [held[name] for name in there]
            _, known = self.reads.variables.setdefault(space.__name__, (held, set()))
            known |= {name for name in there if isinstance(held[name], BuiltinFunctionType | FunctionType)}

    def _variables(self, function: FunctionType, names: Iterable[str], attributes: frozenset[str]) -> None:
        space = function.__globals__
        there = [name for name in names if name in space]
        _, known = self.reads.variables.setdefault(str(space.get("__name__", "globals")), (space, set()))
        known |= set(there)
        for name in there:
            self._global(space[name], attributes, installed=is_installed(function.__code__.co_filename))

    def _global(self, value: object, attributes: frozenset[str], *, installed: bool) -> None:
        """Follow what a global leads to: functions, classes, and what of another Python module is named
        beside it.
        """
        self._follow(value)
        if isinstance(value, type):
            if not is_of_torch(value) and not issubclass(value, BaseException):
                self._add_class(value)
        elif isinstance(value, ModuleType):
            origin = getattr(value, "__file__", None) or ""
            if origin and _is_read(origin) and not origin.startswith(TORCH):
                held = vars(value)
                names = attributes & held.keys()
                _, known = self.reads.variables.setdefault(value.__name__, (held, set()))
                for name in names - known:
                    known.add(name)
                    self._global(held[name], frozenset(), installed=is_installed(origin))
        elif not installed and isinstance(value, Mapping | list | tuple):
            for item in value.values() if isinstance(value, Mapping) else value:
                self._follow(item)
        elif (
            not installed
            and hasattr(value, "__dict__")
            and not isinstance(value, BuiltinFunctionType | FunctionType)
        ):
            self._add_object(value)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


@functools.cache
def _is_read(filename: str) -> bool:
    """Whether code in a file is the model's: torch's layers are, the rest of torch, Python and effcompile are
    not.
    """
    if filename.startswith(TORCH):
        return filename.startswith(_LAYERS)
    installed = any(part in filename for part in INSTALLED)
    return not filename.startswith((OURS, "<frozen")) and (installed or not filename.startswith(STANDARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Names in one function, in the functions inside it too."""

    attributes: frozenset[str]
    variables: frozenset[str]
    used: frozenset[str]
    stored: frozenset[str]
    keeps: bool
    by_name: bool


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Named:
    attributes: set[str] = set()
    variables: set[str] = set()
    used: set[str] = set()
    stored: set[str] = set()
    by_name = keeps = False
    for part in _codes(code):
        operations = list(dis.get_instructions(part))
        keeps |= any(op.opname in ("STORE_ATTR", "STORE_SUBSCR") for op in operations)
        variables |= {str(op.argval) for op in operations if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        used |= {
            str(op.argval)
            for at, op in enumerate(operations)
            if op.opname in _LOADS and not _is_count(operations, at)
        }
        stored |= {str(op.argval) for op in operations if op.opname == "STORE_ATTR"}
        attributes |= set(part.co_names) | set(_strings(part.co_consts))
        by_name |= any(
            op.argval == "getattr" and not _is_constant(operations[at + 1 :])
            for at, op in enumerate(operations)
        )
    by_name |= bool(attributes & _BY_NAME)
    keeps |= bool(attributes & _CHANGING)
    return _Named(
        attributes=frozenset(attributes), variables=frozenset(variables), used=frozenset(used),
        stored=frozenset(stored), keeps=keeps, by_name=by_name,
    )  # fmt: skip


def _is_count(operations: list[dis.Instruction], at: int) -> bool:
    """Whether a name is loaded for no more than to store it anew: `self.k += …`, `self.held["k"] += …`,
    `self.k = self.k + 1`.
    """
    copies = ("COPY", "DUP_TOP")
    if operations[at - 1].opname.startswith(copies) or (
        at + 2 < len(operations) and operations[at + 2].opname.startswith(copies)
    ):
        return True
    stored = [op for op in operations[at + 1 : at + 5] if op.opname.startswith("STORE_")][:1]
    return [op.argval for op in stored] == [operations[at].argval]


def _is_constant(after: list[dis.Instruction]) -> bool:
    """Whether the operations after `getattr` load an object and then a name that is written there."""
    at = next((at for at, op in enumerate(after) if not op.opname.startswith(_OPERANDS)), len(after))
    names = [
        op.opname.partition("_")[0] if op.opname != "LOAD_CONST" else "CONST" for op in after[at : at + 3]
    ]
    called = names[:2] in (["CONST", "PRECALL"], ["CONST", "CALL"]) or names in (
        ["CONST"] * 2 + ["PRECALL"],
        ["CONST"] * 2 + ["CALL"],
    )
    return called and isinstance(after[at].argval, str)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _strings(constants: Iterable[object]) -> Iterator[str]:
    """Those among constants that can be names, in tuples of them too."""
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)
