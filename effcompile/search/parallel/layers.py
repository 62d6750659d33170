"""The repeated layers of any model, and a copy of it without data that has few of them.

Layers are what nn.ModuleLists hold. Two are of one kind where their parameters have the same shapes and their
modules the same classes and plain attributes, numbers that count layers left out. The first of each list
stand for all: so many that every kind is among them between two others, and the step of a model of hundreds
of layers is captured in seconds and little memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One list of layers.

    `path`: its qualified name. `kinds`: of each layer. `shown`: how many of the first stand for all.
    """

    path: str
    layers: Sequence[nn.Module]
    kinds: tuple[int, ...]
    shown: int


def runs_of(model: nn.Module) -> tuple[LayerRun, ...]:
    """The outermost lists of layers, in the order in which they are registered; kinds are counted over all of
    them.

    Raises:
        UsageError: the model has none.
    """
    found: list[LayerRun] = []
    known: dict[object, int] = {}
    for path, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList)
            or len(module) < 2
            or any(path.startswith(f"{run.path}.") for run in found)
        ):
            continue
        layers = list(module)
        if not all(any(True for _ in layer.parameters()) for layer in layers):
            continue
        kinds = tuple(known.setdefault(signature, len(known)) for signature in _signatures(layers))
        found.append(LayerRun(path=path, layers=layers, kinds=kinds, shown=_shown(kinds)))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no nn.ModuleList of layers: nothing in it repeats that devices "
            "could divide block by block. Put its layers into an nn.ModuleList."
        )
    most = max(sum(p.numel() for layer in run.layers for p in layer.parameters()) for run in found)
    return tuple(
        r for r in found if sum(p.numel() for layer in r.layers for p in layer.parameters()) * 20 > most
    )


def _shown(kinds: tuple[int, ...]) -> int:
    """The shortest prefix in which each kind stands at a place that is neither the first nor the last, and
    one more.
    """
    for count in range(3, len(kinds)):
        if set(kinds[1 : count - 1]) == set(kinds):
            return count
    return len(kinds)


def _signatures(layers: Sequence[nn.Module]) -> list[object]:
    """Of each layer what makes it one of a kind; what counts the layers (0, 1, 2 …) is left out."""
    plain = [_attributes(layer) for layer in layers]
    counting = {
        at
        for at in plain[0]
        if all(type(found.get(at)) is int and found[at] == i for i, found in enumerate(plain))
    }
    shapes = [tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers]
    kept = [tuple((at, value) for at, value in found.items() if at not in counting) for found in plain]
    return list(zip(shapes, kept, strict=True))


def _attributes(layer: nn.Module) -> dict[tuple[str, str, str], object]:
    """The plain attributes of a layer's modules, and their classes."""
    return {
        (name, type(module).__qualname__, key): value
        for name, module in layer.named_modules()
        for key, value in sorted({**vars(module), "": None}.items())
        if isinstance(value, _PLAIN) and not key.startswith("_")
    }


@contextmanager
def _shortened(runs: Sequence[LayerRun], model: nn.Module) -> Iterator[None]:
    """The model with the first of its layers only; as it was afterwards."""
    lists = [model.get_submodule(run.path) for run in runs]
    whole = [dict(each._modules) for each in lists]
    try:
        for each, run in zip(lists, runs, strict=True):
            for i in range(run.shown, len(run.layers)):
                del each._modules[str(i)]
        yield
    finally:
        for each, modules in zip(lists, whole, strict=True):
            each._modules.clear()
            each._modules.update(modules)


def shortened(model: nn.Module, runs: Sequence[LayerRun], dtype: torch.dtype) -> nn.Module:
    """A copy with few layers whose tensors have no data, in this floating-point type."""
    with _shortened(runs, model):
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, object] = {id(t): _without_data(t, dtype) for t in tensors}
        return copy.deepcopy(model, memo).train()


def _without_data(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wanted = dtype if tensor.is_floating_point() and isinstance(tensor, nn.Parameter) else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=wanted, device="meta")
    return (
        nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    )
