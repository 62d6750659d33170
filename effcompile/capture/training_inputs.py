"""The user's inputs of a training step: what of them is a tensor of the graph, and what was fixed at capture."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.core.errors import InputsError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """How to read (args, kwargs) as the flat tensors of a captured step.

    Attributes:
        model: name of the model's class.
        positions: parameter names of positional inputs, so that `model(ids)` and `model(input_ids=ids)` are one to us.
        rest: name of `*args`, or "arg" where the forward has none: inputs beyond `positions` are rest_0, rest_1, ...
        accepted: keywords that the forward takes; None when it takes any. Others are for the user's loss alone.
        example: path → the example's leaf, for tensors as (shape, dtype).
    """

    model: str
    positions: tuple[str, ...]
    rest: str | None
    accepted: frozenset[str] | None
    example: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepInputs:
        parameters = list(inspect.signature(model.forward).parameters.values())
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        empty = cls(
            model=type(model).__name__,
            positions=tuple(positional),
            rest=next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None),
            accepted=None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(named),
            example={},
        )
        example = {path: _kind(leaf) for path, leaf in empty.flat(args, kwargs).items()}
        strange = {path: kind for path, kind in example.items() if not isinstance(kind, (*_PLAIN, _Tensor))}
        for path, kind in strange.items():
            raise InputsError(
                f"{path} is a {type(kind).__name__}. What it holds would be fixed in the graph: "
                "give tensors, plain values, or tuples, lists and dicts of them."
            )
        return cls(model=empty.model, positions=empty.positions, rest=empty.rest, accepted=empty.accepted, example=example)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors, in the order of the graph's inputs.

        Raises:
            InputsError: an input is missing or new, or has another shape, dtype or (where it is no tensor) value.
        """
        found = self.flat(args, kwargs)
        if found.keys() != self.example.keys():
            missing, new = sorted(self.example.keys() - found.keys()), sorted(found.keys() - self.example.keys())
            parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"not there at capture: {', '.join(new)}"] * bool(new)
            raise InputsError(
                f"The training step of {self.model} was captured with other inputs: {'; '.join(parts)}. "
                "Call it with the inputs it was captured with, or capture it again."
            )
        for path, leaf in found.items():
            self._check(path, leaf)
        return [found[path] for path, kind in self.example.items() if isinstance(kind, _Tensor)]

    def forward_part(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs without those that only the user's loss can take."""
        taken = args if self.rest else args[: len(self.positions)]
        return taken, {name: value for name, value in kwargs.items() if self.accepted is None or name in self.accepted}

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Path → leaf, sorted by input name; None is the same as nothing given."""
        names = [*self.positions[: len(args)], *(f"{self.rest or 'arg'}_{i}" for i in range(len(args) - len(self.positions)))]
        given = dict(zip(names, args, strict=True)) | dict(kwargs)
        paths, _ = pytree.tree_flatten_with_path({name: given[name] for name in sorted(given) if given[name] is not None})
        return {path[0].key + pytree.keystr(path[1:]): leaf for path, leaf in paths}  # type: ignore[attr-defined]

    def _check(self, path: str, leaf: Any) -> None:
        wanted, found = self.example[path], _kind(leaf)
        if isinstance(wanted, _Tensor) and isinstance(found, _Tensor):
            self._check_gradient(path, wanted, found)
        if found != wanted:
            raise InputsError(
                f"The training step of {self.model} was captured for {path} = {wanted}, but got {found}. "
                "Shapes, dtypes and plain values are fixed at capture: pad or drop the last batch, or capture it again."
            )

    def _check_gradient(self, path: str, wanted: _Tensor, found: _Tensor) -> None:
        if found.differentiated and not wanted.differentiated:
            raise InputsError(
                f"{path} requires a gradient at this call and did not when the training step of {self.model} was captured, which makes "
                f"none for it. Call effcompile.optimize again with inputs whose {path} requires one, or give {path}.detach() if what made "
                "it is not trained through this loss."
            )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What is fixed of a tensor input; `differentiated`: whether it gets a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiated: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def _kind(leaf: Any) -> Any:
    return _Tensor(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for one tensor of the inputs."""

    index: int


Refill = Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def split_tensors(inputs: StepInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Refill]:
    """Copies of the tensors in the order of `inputs.leaves`, and the way back from such a list to (args, kwargs).

    Copies, for one tensor given twice (labels=input_ids) would become one input of the graph.
    """
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    places = [_Place(index) if isinstance(leaf, torch.Tensor) else leaf for index, leaf in enumerate(flat)]
    order = [place.index for place in inputs.flat(*pytree.tree_unflatten(places, spec)).values() if isinstance(place, _Place)]

    def refill(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(flat)
        for index, tensor in zip(order, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    return [flat[index].detach().clone().requires_grad_(flat[index].requires_grad) for index in order], refill
