"""The layers of a model: the list that its depth is the length of, and ways to run a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from effcompile.core.errors import UsageError
from effcompile.core.types import Args, Forward, Kwargs, Outputs

#: A second stack with this share of the largest one's parameters is as much one of the model's: which of them
#: is meant cannot be told.
_AS_LARGE = 0.25


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers. `name`: qualified name of the list."""

    name: str
    modules: nn.ModuleList | nn.Sequential

    def __len__(self) -> int:
        return len(self.modules)


def find_layers(model: nn.Module) -> Layers:
    """The list of modules of one class that holds most of the parameters; lists inside such a list are its
    layers' own.

    Raises:
        UsageError: there is none, or there are several as large (an encoder and a decoder).
    """
    found = sorted(_stacks(model), key=lambda layers: -_size(layers.modules))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of layers: an nn.ModuleList of modules of one class. "
            "Without it `depth`, `layers`, `tokens` and `init` do not know what a layer is."
        )
    if len(found) > 1 and _size(found[1].modules) > _AS_LARGE * _size(found[0].modules):
        names = " and ".join(layers.name for layers in found[:2])
        raise UsageError(
            f"{type(model).__name__} has more than one stack of layers, {names}: which of them is meant "
            "cannot be told."
        )
    return found[0]


def _stacks(model: nn.Module, prefix: str = "") -> Iterator[Layers]:
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if (
            isinstance(child, (nn.ModuleList, nn.Sequential))
            and len(child)
            and len({type(one) for one in child}) == 1
            and _size(child)
        ):
            yield Layers(path, child)
        else:
            yield from _stacks(child, f"{path}.")


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Forwards:
    """While it lasts, modules have another forward, as an attribute of theirs.

    It can be entered again and again.

    Raises:
        UsageError: one of them has another forward already.
    """

    def __init__(self, changed: Mapping[nn.Module, Forward]) -> None:
        self.changed = changed

    def __enter__(self) -> None:
        for module, forward in self.changed.items():
            if "forward" in vars(module):
                raise UsageError(
                    f"A {type(module).__name__} has a forward of its own already: two fields of a stage "
                    "would both change it."
                )
            module.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for module in self.changed:
            module.__dict__.pop("forward", None)


def skipping(layers: Sequence[nn.Module], dropped: frozenset[int]) -> Forwards:
    """While it lasts, these layers hand on what they are given. Parameters and names stay."""
    return Forwards({layers[i]: _handing_on(layers[i]) for i in sorted(dropped)})


def behind_gather(layers: Sequence[nn.Module], picked: Callable[[Tensor], Tensor]) -> Forwards:
    """While it lasts, all layers run on some tokens, and the others come out as they went in.

    picked: hidden states (batch, tokens, width) → the places of the tokens that are kept, ascending, (batch,
    kept).
    """
    own = [layer.forward for layer in layers]

    def together(*args: Any, **kwargs: Any) -> Outputs:
        hidden, rest, named = _taken_apart(args, kwargs)
        places = picked(hidden)
        short, given = (
            gathered(hidden, places, 1),
            pytree.tree_map_only(Tensor, _picker(hidden, places), (rest, named)),
        )
        out: Outputs = short
        for forward in own:
            out = forward(_hidden(out), *given[0], **given[1])
        return _like(
            out, hidden.scatter(1, places[..., None].expand_as(_hidden(out)), _hidden(out).to(hidden.dtype))
        )

    return Forwards({layer: _handing_on(layer) for layer in layers[1:]} | {layers[0]: together})


def _handing_on(layer: nn.Module) -> Forward:
    """A forward that returns the hidden states as they came, in the form of the layer's outputs, which the
    first call of it shows.
    """
    own = type(layer).forward
    returns = getattr(own, "__annotations__", {}).get("return")
    as_tuple = "tuple" in str(returns).lower() and "Tensor |" not in str(returns)

    def forward(*args: Any, **kwargs: Any) -> Outputs:
        hidden = _taken_apart(args, kwargs)[0]
        return (hidden,) if as_tuple else hidden

    return forward


def _taken_apart(args: Args, kwargs: Kwargs) -> tuple[Tensor, Args, Kwargs]:
    """A layer's hidden states, and the rest of its arguments."""
    if args:
        return args[0], args[1:], dict(kwargs)
    named = dict(kwargs)
    return named.pop("hidden_states"), (), named


def _hidden(output: Outputs) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _like(output: Outputs, hidden: Tensor) -> Outputs:
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def gathered(value: Tensor, places: Tensor, axis: int) -> Tensor:
    """The entries of a tensor along an axis, each example's own; its first axis is that of the examples, or
    has one entry.
    """
    count, kept = places.shape
    whole = value.expand(count, *value.shape[1:])
    index = places.view(count, *[1] * (axis - 1), kept, *[1] * (value.dim() - axis - 1))
    return whole.gather(axis, index.expand(*whole.shape[:axis], kept, *whole.shape[axis + 1 :]))


def _picker(hidden: Tensor, places: Tensor) -> Callable[[Tensor], Tensor]:
    """What is done to the other arguments of a layer: those that have an entry for each token lose those of
    the tokens that are dropped.
    """
    tokens = hidden.shape[1]

    def pick(value: Tensor) -> Tensor:
        # masks; positions, cosines and sines
        axes = (2, 3) if value.dim() == 4 else (1,) if value.dim() in (2, 3) else ()
        for axis in axes:
            if value.shape[axis] == tokens:
                value = gathered(value, places, axis)
        return value

    return pick


def drawn(hidden: Tensor, kept: int) -> Tensor:
    """Places of `kept` tokens, drawn for each example anew, the first one always among them: it is the
    class's, or the beginning.
    """
    count, tokens = hidden.shape[:2]
    order = torch.rand(count, tokens - 1, device=hidden.device).argsort(1)[:, : kept - 1] + 1
    first = torch.zeros(count, 1, dtype=order.dtype, device=order.device)
    return torch.cat([first, order.sort(1).values], 1)
