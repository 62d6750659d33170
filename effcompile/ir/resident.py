"""What is alive on a device before a step begins, whether or not the step reads it: every storage of the
model and its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from effcompile.core import gpu


def resident_bytes(model: nn.Module, *given: object) -> int:
    """Bytes of the distinct storages of parameters, buffers, tensor attributes and `given` (nested tensors)
    on the model's device.

    A view counts with its whole storage, and storages that several tensors share count once.
    """
    device = next((p.device.type for p in model.parameters()), None)
    return storage_bytes(
        t for t in (*_tensors_of(model), *_leaves(given)) if device is None or t.device.type == device
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind tensors; those of a wrapper subclass are what it wraps."""
    storages = {
        s._cdata: _taken(s)
        for tensor in tensors
        for plain in _plain(tensor)
        for s in (plain.untyped_storage(),)
    }
    return sum(storages.values())


def _taken(storage: torch.UntypedStorage) -> int:
    return gpu.rounded(storage.nbytes()) if storage.device.type == "cuda" else storage.nbytes()


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from _leaves(list(vars(module).values()))


def _leaves(values: object) -> Iterator[torch.Tensor]:
    yield from (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or those that a wrapper subclass (a quantised or distributed tensor) holds; a sparse one's
    parts.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor
