"""Parameters that a forward reads by a name that is not registered: a step would hold them as constants."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from effcompile.core.errors import CaptureError


def refuse_aliases(
    model: nn.Module, constants: Iterable[torch.Tensor | None], held: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Refuse a step whose graph has a trained parameter as a constant, too: the gradient through it would be
    lost, and it would be the weight of the day of planning.

    `held`: what attributes, lists and globals hold that the forward may read, by place. A detached one is no
    alias: no gradient goes through it. A constant that is one of these is read there; of any other, all is
    known is the memory that it shares, for export makes a tensor of its own of a parameter.

    Raises:
        CaptureError: names the place and the parameter.
    """
    trained: dict[int | None, str] = {
        key: name
        for name, p in model.named_parameters()
        if p.requires_grad and (key := _storage(p)) is not None
    }
    shared = [constant for constant in constants if _storage(constant) in trained]
    if not shared:
        return
    known = list(held)
    detached = {id(tensor) for _, tensor in known if not tensor.requires_grad}
    read = {_storage(constant) for constant in shared if id(constant) not in detached}
    places = {
        place: trained[key]
        for place, tensor in known
        if tensor.requires_grad and (key := _storage(tensor)) in read
    }
    if places:
        name = next(iter(places.values()))
        where = " or ".join([place for place, of in places.items() if of == name][:3])
        raise CaptureError(
            f"The forward of {type(model).__name__} reads the parameter {name} at {where}, which is not "
            "registered: a planned step would hold it as a constant, and its gradient there would be lost. "
            f"Read {name} by its own name in the forward, or register it there, too (an attribute of the "
            "module, an nn.ParameterList)."
        )


def _storage(tensor: torch.Tensor | None) -> int | None:
    """What tells the memory of a tensor from others'; None of one that has none of its own."""
    try:
        return None if tensor is None else tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, subclasses that wrap others
        return None
