"""Whether a call is like the one that was captured.

Finds the graph's tensors among (args, kwargs), and refuses what would be another graph.

What is no tensor was a constant at capture: it must be the same again, by type and value. Dicts are matched
by key, arguments by parameter, and an argument that is left out is its default.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from effcompile.core.dispatch import method_by_type
from effcompile.core.errors import GuardError, InputsError
from effcompile.core.types import Kwargs, Value
from effcompile.ir.guards import Guard, described, same

#: Ways of passing the arguments (how many by position, which by name) that are remembered.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a forward takes.

    Attributes:
        positional: names of those that can be given by position, so that `model(ids)` and
            `model(input_ids=ids)` are one to us.
        rest: name of `*args`, or "arg" where the forward has none: inputs beyond `positional` are rest_0,
            rest_1, ...
        named: those that can be given by name; None when it takes any name.
        defaults: values of those that may be left out.
    """

    positional: tuple[str, ...]
    rest: str
    has_rest: bool
    named: frozenset[str] | None
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., object]) -> Parameters:
        found = list(inspect.signature(forward).parameters.values())
        rest = next((p.name for p in found if p.kind is p.VAR_POSITIONAL), None)
        named = frozenset(p.name for p in found if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        return cls(
            positional=tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            rest=rest or "arg",
            has_rest=rest is not None,
            named=None if any(p.kind is p.VAR_KEYWORD for p in found) else named,
            defaults={p.name: p.default for p in found if p.default is not p.empty},
        )

    def names(self, count: int) -> list[str]:
        """Of so many arguments by position."""
        return [*self.positional[:count], *(f"{self.rest}_{i}" for i in range(count - len(self.positional)))]

    def by_name(self, args: Sequence[object], kwargs: Kwargs) -> dict[str, object]:
        """The arguments that were given."""
        return dict(zip(self.names(len(args)), args, strict=True)) | dict(kwargs)

    def accepts(self, name: str) -> bool:
        """Whether the forward has an argument of this name."""
        return (
            self.named is None
            or name in self.named
            or name in self.positional
            or (self.has_rest and name.startswith(f"{self.rest}_"))
        )


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Where a value stands in a call: for people `batch['mask']`, in a guard `inputs['batch']['mask']`."""

    name: str
    path: str = ""

    def at(self, key: object) -> ArgumentPlace:
        return ArgumentPlace(self.name, f"{self.path}[{key!r}]")

    def __str__(self) -> str:
        return self.name + self.path

    @property
    def guarded(self) -> str:
        return f"inputs[{self.name!r}]{self.path}"


class _Node(Protocol):
    """One part of the captured arguments."""

    place: ArgumentPlace

    def take(self, value: Value, found: list[Value]) -> None:
        """Put the tensors of a value at the same place into `found`.

        Raises GuardError where it is another value.
        """


@dataclass(slots=True)
class _Tensor:
    place: ArgumentPlace
    index: int

    def take(self, value: Value, found: list[Value]) -> None:
        if not isinstance(value, torch.Tensor) or value.is_nested:
            raise _other(self.place, "a tensor", _shown(value))
        found[self.index] = value


@dataclass(slots=True)
class _Value:
    """A plain value, or any other object, which must be the same one.

    `default`: it was not given at capture.
    """

    place: ArgumentPlace
    value: Any
    default: bool = False

    def take(self, value: Value, found: list[Value]) -> None:
        if value is self.value or (isinstance(value, _PLAIN) and same(value, self.value)):
            return
        if self.default:
            raise GuardError(
                f"The inputs differ from those the plan was made with (not planned for: {self.place} = "
                f"{_shown(value)}; it was left out, and is {described(self.value)} then). {_AGAIN}",
                place=self.place.guarded,
            )
        raise _other(self.place, described(self.value), _shown(value))


@dataclass(slots=True)
class _Mapping:
    place: ArgumentPlace
    kind: type[Any]
    items: dict[Any, _Node]

    def take(self, value: Value, found: list[Value]) -> None:
        if type(value) is not self.kind:
            raise _other(self.place, f"a {self.kind.__name__}", f"a {type(value).__name__}")
        if value.keys() != self.items.keys():
            raise _other(
                self.place,
                f"a dict of {', '.join(map(repr, self.items))}",
                f"one of {', '.join(map(repr, value)) or 'nothing'}",
            )
        for key, node in self.items.items():
            node.take(value[key], found)


@dataclass(slots=True)
class _Sequence:
    place: ArgumentPlace
    kind: type[Any]
    items: list[_Node]

    def take(self, value: Value, found: list[Value]) -> None:
        if type(value) is not self.kind or len(value) != len(self.items):
            length = f" of {len(value)}" if isinstance(value, Sequence) else ""
            raise _other(
                self.place,
                f"a {self.kind.__name__} of {len(self.items)}",
                f"a {type(value).__name__}{length}",
            )
        for node, item in zip(self.items, value, strict=True):
            node.take(item, found)


@dataclass(slots=True)
class _Registered:
    """A class that is registered with torch's pytrees, taken apart as they do."""

    place: ArgumentPlace
    spec: pytree.TreeSpec
    items: list[_Node]

    def take(self, value: Value, found: list[Value]) -> None:
        leaves, spec = pytree.tree_flatten(value)
        if spec != self.spec:
            raise _other(
                self.place, f"a {self.spec.type.__name__} as at capture", f"a {type(value).__name__}"
            )
        for node, leaf in zip(self.items, leaves, strict=True):
            node.take(leaf, found)


_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | enum.Enum
_AGAIN = "Plan again with the inputs you use."


def _other(place: ArgumentPlace, was: str, now: str) -> GuardError:
    return GuardError(
        f"{place} = {was} when the plan was made, but got {now}: shapes, dtypes and plain values are "
        f"fixed in it. {_AGAIN}",
        place=place.guarded,
    )


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return described(value)
    return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)}"


@dataclass(slots=True)
class _Builder:
    """Makes the nodes of example arguments; tensors are numbered in the order in which they are met, unless
    they are defaults.
    """

    tensors: list[tuple[ArgumentPlace, torch.Tensor]] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    default: bool = False

    @method_by_type
    def node(self, value: object, place: ArgumentPlace) -> _Node:
        leaves, spec = pytree.tree_flatten(value)
        if self.default or spec.is_leaf():
            self.values.append(made := _Value(place, value, self.default))
            return made
        return _Registered(place, spec, [self.node(leaf, place.at(i)) for i, leaf in enumerate(leaves)])

    @node.register
    def _(self, value: torch.Tensor, place: ArgumentPlace) -> _Node:
        if self.default:
            return _Value(place, value, default=True)
        if value.is_nested:
            raise InputsError(
                f"{place} is a nested tensor, whose rows have lengths of their own, and a plan holds dense "
                "ones. Give a padded tensor (torch.nested.to_padded_tensor) and a mask."
            )
        self.tensors.append((place, value))
        return _Tensor(place, len(self.tensors) - 1)

    @node.register
    def _(self, value: dict, place: ArgumentPlace) -> _Node:  # type: ignore[type-arg] # dispatches on it
        return _Mapping(
            place, type(value), {key: self.node(item, place.at(key)) for key, item in value.items()}
        )

    @node.register
    def _(self, value: list | tuple, place: ArgumentPlace) -> _Node:  # type: ignore[type-arg] # as above
        return _Sequence(place, type(value), [self.node(item, place.at(i)) for i, item in enumerate(value)])


class CallChecks:
    """The arguments of the capture, as what later ones are held against.

    Attributes:
        tensors: where the graph's tensors stand, and the example's, in the order of the graph's inputs: that
            of the arguments, or with `by_name` that of the sorted names.
        values: what else was given.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        name: str,
        args: Sequence[object],
        kwargs: Kwargs,
        *,
        by_name: bool = False,
    ) -> None:
        self.parameters, self._name = Parameters.of(forward), name
        given = self.parameters.by_name(args, kwargs)
        builder = _Builder()
        self._nodes = {
            key: builder.node(given[key], ArgumentPlace(key)) for key in (sorted(given) if by_name else given)
        }
        self.tensors = builder.tensors
        builder.default = True
        left_out = {key: value for key, value in self.parameters.defaults.items() if key not in given}
        self._nodes |= {key: builder.node(value, ArgumentPlace(key)) for key, value in left_out.items()}
        self.values = [(node.place, node.value) for node in builder.values if not node.default]
        self._constants = builder.values
        self._known: dict[tuple[int, tuple[str, ...]], list[_Node]] = {}

    def take(self, args: Sequence[object], kwargs: Kwargs) -> list[torch.Tensor]:
        """The call's tensors, in the order of `tensors`; their shapes and dtypes are not looked at.

        Raises:
            GuardError: an argument is missing or new, or is another value than at capture.
        """
        passed = (len(args), tuple(kwargs))
        nodes = self._known.get(passed)
        if nodes is None:
            nodes = self._nodes_of(args, kwargs)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[passed] = nodes
        found: list[Any] = [None] * len(self.tensors)
        for node, value in zip(nodes, (*args, *kwargs.values()), strict=True):
            node.take(value, found)
        return found

    def _nodes_of(self, args: Sequence[object], kwargs: Kwargs) -> list[_Node]:
        """The node of each argument that is passed in this way.

        Raises:
            GuardError: one is missing or new.
        """
        accepted = self.parameters
        names = [*accepted.names(len(args)), *kwargs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise GuardError(
                f"{self._name} cannot be called so: {twice[0]} is given twice.",
                place=ArgumentPlace(twice[0]).guarded,
            )
        values = dict(zip(names, (*args, *kwargs.values()), strict=True))
        nothing = {
            name
            for name in names
            if name not in self._nodes and values[name] is None and not accepted.accepts(name)
        }
        new = sorted(set(names) - self._nodes.keys() - nothing)
        missing = sorted(name for name in self._nodes.keys() - set(names) if not self._is_default(name))
        if new or missing:
            if strange := [name for name in new if not accepted.accepts(name)]:
                raise GuardError(
                    f"{self._name} cannot be called so: it takes no {strange[0]!r}.",
                    place=ArgumentPlace(strange[0]).guarded,
                )
            parts = [f"not planned for: {', '.join(new)}"] * bool(new) + [
                f"missing: {', '.join(missing)}"
            ] * bool(missing)
            smoothed = (
                " HuggingFace's Trainer takes the labels away for label_smoothing_factor: leave that out."
                * ("labels" in missing)
            )
            said = (
                f"The inputs differ from those the plan was made with ({'; '.join(parts)}).{smoothed} "
                f"{_AGAIN}"
            )
            raise GuardError(said, place=ArgumentPlace((new or missing)[0]).guarded)
        return [
            self._nodes[name] if name not in nothing else _Value(ArgumentPlace(name), None) for name in names
        ]

    def _is_default(self, name: str) -> bool:
        """Whether leaving an argument out is the same as what was captured for it."""
        defaults = self.parameters.defaults
        if name not in defaults:
            return False
        try:
            self._nodes[name].take(defaults[name], [None] * len(self.tensors))
        except GuardError:
            return False
        return not isinstance(defaults[name], torch.Tensor) or isinstance(self._nodes[name], _Value)

    @property
    def positional(self) -> tuple[str, ...]:
        """See `ir.guards.CallGuards`."""
        return self.parameters.positional

    def texts(self, *, given: bool) -> dict[str, str]:
        """See `ir.guards.CallGuards`."""
        return {
            node.place.guarded: described(node.value) for node in self._constants if node.default is not given
        }

    def listed(self) -> Iterator[Guard]:
        """The values that are fixed; what is fixed of the tensors is known to who runs the graph."""
        for node in self._constants:
            yield Guard(kind="input", place=node.place.guarded, expected=described(node.value))
