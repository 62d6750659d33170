"""What enters a captured graph and what leaves it: a role for each placeholder, and one for each of the flat
results.

Inference, training and generation are told apart by nothing else: a training step has a loss and gradients
among its results, a generation step state (keys and values) that enters and is updated. torch.export's
signature (InputKind, OutputKind) is the model.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx


class Entering(enum.Enum):
    """What a placeholder stands for."""

    PARAMETER = enum.auto()
    BUFFER = enum.auto()
    CONSTANT = enum.auto()  # a tensor that capture found, neither parameter nor buffer
    INPUT = enum.auto()  # the user's
    CODES = enum.auto()  # what a frozen parameter is held as
    STATE = enum.auto()  # what the call before left: keys and values, say
    TANGENT = enum.auto()  # the gradient that arrives at a result


class Leaving(enum.Enum):
    """What a result is."""

    LOSS = enum.auto()
    OUTPUT = enum.auto()
    UPDATED = enum.auto()  # the new value of a buffer or of state
    GRADIENT = enum.auto()  # of a parameter
    INPUT_GRADIENT = enum.auto()


@dataclass(frozen=True, slots=True)
class Enters:
    """A placeholder's role, the name that it has there, and the tensor of a constant.

    A parameter's or buffer's name is qualified; codes have that of the parameter that they stand for.
    """

    role: Entering
    name: str = ""
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Leaves:
    """A result's role, and the name of what it is the new value or the gradient of."""

    role: Leaving
    name: str = ""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a graph's placeholders, in their order, and of its flat results, in theirs."""

    entering: Mapping[fx.Node, Enters]
    leaving: tuple[Leaves, ...]

    def enters(self, *roles: Entering) -> dict[fx.Node, Enters]:
        """The placeholders that have one of these roles."""
        return {node: entry for node, entry in self.entering.items() if entry.role in roles}

    def named(self, role: Entering) -> dict[fx.Node, str]:
        """The placeholders that have this role → their names."""
        return {node: entry.name for node, entry in self.entering.items() if entry.role is role}

    def leaves(self, role: Leaving) -> tuple[str, ...]:
        """The names of the results that have this role."""
        return tuple(result.name for result in self.leaving if result.role is role)

    def results(self, role: Leaving, flat: Iterable[fx.Node | None]) -> dict[str, fx.Node | None]:
        """Name → node, of the flat results that have this role."""
        return {
            result.name: node for result, node in zip(self.leaving, flat, strict=True) if result.role is role
        }

    @property
    def carried(self) -> dict[fx.Node, int]:
        """Buffers and state that enter and are updated → the place of their new value among the results."""
        places = {result.name: at for at, result in enumerate(self.leaving) if result.role is Leaving.UPDATED}
        held = self.enters(Entering.BUFFER, Entering.STATE)
        return {node: places[entry.name] for node, entry in held.items() if entry.name in places}

    def moved(self, nodes: Mapping[fx.Node, fx.Node]) -> Roles:
        """The same roles in a copy of the graph; `nodes` leads from each node to its copy."""
        return replace(self, entering={nodes[node]: entry for node, entry in self.entering.items()})
