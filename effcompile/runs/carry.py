"""What the optimizer knows, carried along when parameters change: a fresh one of the new parameters, with the
moments moved.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a parameter comes from.

    Attributes:
        source: qualified name of one before, whose group it joins. moved: what becomes of that one's moments;
            None: it has none yet.
    """

    source: str
    moved: Callable[[Tensor], Tensor] | None = None


#: Qualified name of a parameter that is new or changed → where it comes from.
Origins = Mapping[str, Origin]
#: Qualified name → the optimizer's states of that parameter.
States = dict[str, dict[str, Any]]


def copied(value: Tensor) -> Tensor:
    """The moments of a copy."""
    return value.clone()


def names_of(model: nn.Module) -> dict[int, str]:
    """id of a parameter → its qualified name."""
    return {id(p): name for name, p in model.named_parameters()}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of the parameters of each of the optimizer's groups; "" for those that are not the model's."""
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def states_of(optimizer: Optimizer, groups: list[list[str]]) -> States:
    """The states by the parameters' names.

    Raises:
        UsageError: there are some of a parameter that is in no group any more.
    """
    try:
        held = optimizer.state_dict()
    except KeyError as error:
        raise UsageError(
            "The optimizer has states of a parameter that is in none of its groups any more, which cannot "
            "be handed on. Put it back, or drop them: optimizer.state.pop(parameter)."
        ) from error
    flat = [name for group in groups for name in group]
    return {flat[number]: state for number, state in held["state"].items()}


def moved_states(
    states: States, origins: Origins, parameters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> States:
    """States of the parameters that there are now. `shapes`: of those before, by name.

    Raises:
        UsageError: they are held in a form that cannot be moved (8 bits, in pieces).
    """
    moved: States = {}
    for name in parameters:
        origin = origins.get(name)
        if origin is None:
            if name in states:
                moved[name] = states[name]
        elif origin.moved is not None and origin.source in states:
            moved[name] = {
                key: _moved(key, value, origin, shapes[origin.source])
                for key, value in states[origin.source].items()
            }
    return moved


def _moved(key: str, value: object, origin: Origin, shape: torch.Size) -> object:
    assert origin.moved is not None
    if not isinstance(value, (Tensor, int, float)) or (
        isinstance(value, Tensor) and type(value) is not Tensor
    ):
        raise UsageError(
            f"The optimizer's state {key!r} of {origin.source} is held in a form that cannot follow a change "
            "of the model. Give the run passes=['states.eight_bit=false', 'states.offload=false']."
        )
    if isinstance(value, Tensor) and value.shape == shape:
        return origin.moved(value)
    return value.clone() if isinstance(value, Tensor) else value


def of_changed(
    optimizer: Optimizer,
    groups: list[list[str]],
    model: nn.Module,
    origins: Origins,
    rates: Mapping[str, float] | None = None,
) -> Optimizer:
    """An optimizer of the given one's class and options for the parameters that there are now, without
    states.

    A parameter that is new joins the group of its source; one that is no more leaves its own. `rates`: what
    learning rates of parameters are multiplied with, which then have groups of their own.
    """
    now = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name for group in groups for name in group}
    made: Optimizer = copy.copy(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = []
    for given, members in zip(optimizer.param_groups, groups, strict=True):
        mine = [
            name
            for name in now
            if name in members or (name not in before and name in origins and origins[name].source in members)
        ]
        for factor in sorted({(rates or {}).get(name, 1.0) for name in mine}):
            chosen = [now[name] for name in mine if (rates or {}).get(name, 1.0) == factor]
            made.param_groups.append({**given, "lr": given["lr"] * factor, "params": chosen})
    return made


def load_states(optimizer: Optimizer, names: Mapping[int, str], states: States, number: int) -> None:
    """Hand the states on to the optimizer of the stage `number`.

    Raises:
        UsageError: it holds them in another form.
    """
    held = optimizer.state_dict()
    flat = [name for group in group_names(optimizer, names) for name in group]
    mine = {place: states[name] for place, name in enumerate(flat) if name in states}
    try:
        optimizer.load_state_dict({"state": mine, "param_groups": held["param_groups"]})
    except FormatError as error:
        raise UsageError(
            f"Stage {number + 1} holds the optimizer's states in another form than the one before: {error} "
            "Give all stages the same, with passes=['states.eight_bit=false'] or max_error=None."
        ) from error


def size_of(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, each once."""
    seen: dict[int, torch.Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in seen.values())
