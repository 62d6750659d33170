"""The model's own step in little memory: the user's modules and autograd's arithmetic, with what waits put
aside.

What autograd saves for the backward lies in a file until it is read, and a gradient leaves for a file as soon
as it is whole: beside the model only what one operator reads and makes is alive. No number changes, so it is
what a planned step is compared with where the original, run as it is, does not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.machine.room import Room
from effcompile.ops.wide import pays
from effcompile.proof.spool import Spool
from effcompile.proof.training.verify import NARROW, differentiated
from effcompile.search.training.work import LeafInputs

#: Operators that multiply matrices, whose arguments are tensors all.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
#: Bytes put aside or read back between two returns of freed pages.
_TIDY_AFTER = 64 << 20


@contextlib.contextmanager
def lean(model: nn.Module, inputs: LeafInputs, gradients: Spool, room: Room) -> Iterator[None]:
    """Within, the model's forward and backward run leanly; its gradients, and those of `inputs`, go to
    `gradients`.

    Raises (from the forward or the backward):
        NoRoomError: even so the room was reached, or the disk is full.
    """
    saved = _Saved(model, room)
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.put_aside, saved.read_back),
        contextlib.ExitStack() as stack,
    ):
        for name, tensor in differentiated(model, inputs):
            if tensor.requires_grad:
                stack.callback(tensor.register_post_accumulate_grad_hook(_leaving(name, gradients)).remove)
        if products_in_fp32(model):
            stack.enter_context(_Wide())
        yield


def products_in_fp32(model: nn.Module) -> bool:
    """Whether a lean run of a model has its 16-bit products in float32: where they are slower than that by
    far.
    """
    return any(pays(parameter.dtype, parameter.device.type) for parameter in model.parameters())


class _Wide(TorchDispatchMode):
    """Within, products of 16-bit matrices are those of the matrices in float32, rounded once: no sum is of
    rounded sums.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = args[-1].dtype if func in _PRODUCTS and not kwargs else None
        if dtype not in NARROW or any(arg.device.type != "cpu" for arg in args):
            return func(*args, **(kwargs or {}))
        return func(*(arg.float() for arg in args)).to(dtype)


def _leaving(name: str, gradients: Spool) -> Callable[[Tensor], None]:
    """A hook that moves a gradient away; what comes in parts (a checkpoint within the model's code) is added
    up.
    """
    there = False

    def leave(parameter: Tensor) -> None:
        nonlocal there
        before = gradients[name] if there else None
        if before is not None and parameter.grad is not None:
            parameter.grad.add_(before)
        gradients.put(name, parameter.grad)
        parameter.grad, there = None, True

    return leave


class _Saved:
    """What autograd saves: in a file, but for what is alive anyway."""

    def __init__(self, model: nn.Module, room: Room) -> None:
        self.room, self.spool, self.count, self.moved = room, Spool(), 0, 0
        self.resident = {
            t.untyped_storage()._cdata
            for t in (*model.parameters(), *model.buffers())
            if type(t) in (Tensor, nn.Parameter)
        }

    def put_aside(self, value: Tensor) -> Any:
        self.room.check()
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return value
        if value.untyped_storage()._cdata in self.resident:
            return value.detach()
        self.count += 1
        self.spool.put(str(self.count), value)
        self._tidied(value)
        return str(self.count)

    def read_back(self, held: Any) -> Tensor:
        if isinstance(held, str):
            value = self.spool.mapped(held)
            assert value is not None
            self._tidied(value)
            return value
        assert isinstance(held, Tensor)
        return held

    def _tidied(self, value: Tensor) -> None:
        """Return freed pages to the system now and then: what comes and goes in pieces of all sizes leaves
        many behind.
        """
        self.moved += value.untyped_storage().nbytes()
        if self.moved > _TIDY_AFTER:
            self.moved = 0
            self.room.tidy()
