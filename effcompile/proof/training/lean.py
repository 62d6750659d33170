"""The model's own step in little memory: the user's modules and autograd's arithmetic, with what waits put
aside.

What autograd saves for the backward goes to a file once room is short, the oldest first, and a gradient as
soon as it is whole: beside the model little more than what one operator reads and makes has to be alive. No
number changes, so it is what a planned step is compared with where the original, run as it is, does not fit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.machine.memory import give_back
from effcompile.machine.room import Room
from effcompile.ops.wide import pays
from effcompile.proof.spool import Spool
from effcompile.proof.training.verify import NARROW, differentiated
from effcompile.search.training.work import LeafInputs

#: Operators that multiply matrices, whose arguments are tensors all.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
#: Bytes saved or read back between two looks at the room: each asks the system.
_LOOK_AFTER = 16 << 20
#: Shares of the room at the start: below the first it is short, and up to the second it is made again.
_SHORT, _AMPLE = 0.5, 0.65
#: Bytes that may wait to be written while the next ones are computed.
_MOST_BEHIND = 256 << 20


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
        stack.enter_context(wide_products(model))
        stack.callback(saved.spool.close)  # torch may keep what a hook raised, and its frames, for good
        try:
            yield
        except BaseException:
            gradients.close()
            raise


def products_in_fp32(model: nn.Module) -> bool:
    """Whether a lean run of a model has its 16-bit products in float32: where they are slower than that by
    far.
    """
    return any(pays(parameter.dtype, parameter.device.type) for parameter in model.parameters())


def wide_products(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Within, products are those of a lean run of a model."""
    return _Wide() if products_in_fp32(model) else contextlib.nullcontext()


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


class _Held:
    """A value that autograd saved, once or several times: at hand, or in the file under its name."""

    __slots__ = ("__weakref__", "name", "value", "version")

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.version = name, value._version
        self.value: Tensor | None = value.detach()


def behind(left: float) -> int:
    """Bytes that may wait in a lean run, where so many may be allocated: what it makes room by at a time."""
    return int(max(0, min(_MOST_BEHIND, (_AMPLE - _SHORT) * left)))


class _Saved:
    """What autograd saves: as it is while there is room, then in a file; but for what is alive anyway."""

    def __init__(self, model: nn.Module, room: Room) -> None:
        self.room, self.count, self.largest = room, 0, 0
        self.start, self.moved = room.left(), _LOOK_AFTER
        self.spool = Spool(behind=behind(self.start))
        self.at_hand = deque[weakref.ref[_Held]]()
        # what a loss saves, its log-softmax saved as well
        self.known = weakref.WeakValueDictionary[tuple[object, ...], _Held]()
        self.resident = {
            t.untyped_storage()._cdata
            for t in (*model.parameters(), *model.buffers())
            if type(t) in (Tensor, nn.Parameter)
        }

    def put_aside(self, value: Tensor) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return value
        if value.untyped_storage()._cdata in self.resident:
            return value.detach()
        seen = value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
        key = value.untyped_storage()._cdata, value.storage_offset(), *seen
        before = self.known.get(key)
        # as long as it is at hand, no other storage lies where its own does
        if before is not None and before.value is not None and before.version == value._version:
            return before
        self.count += 1
        held = self.known[key] = _Held(str(self.count), value)
        self.at_hand.append(weakref.ref(held))
        self._looked(value)
        return held

    def read_back(self, held: Any) -> Tensor:
        if not isinstance(held, _Held):
            assert isinstance(held, Tensor)
            return held
        if held.value is not None:
            if held.value._version != held.version:  # autograd's own check, which it leaves to hooks
                raise RuntimeError("a value that the backward needs was modified by an inplace operation")
            return held.value
        value = self.spool.mapped(held.name)
        assert value is not None
        self._looked(value)
        return value

    def _looked(self, value: Tensor) -> None:
        """Look at the room now and then, and make some where it is short: freed pages go back to the system,
        and what was saved first to the file.
        """
        size = value.untyped_storage().nbytes()
        self.moved, self.largest = self.moved + size, max(self.largest, size)
        if self.moved < _LOOK_AFTER:
            return
        self.moved = 0
        short, ample = (max(share * self.start, 2 * self.largest) for share in (_SHORT, _AMPLE))
        waiting = self.spool.waiting  # and what is written by now is freed
        if self.room.left() >= short:
            return
        give_back()
        left = self.room.left() + waiting
        while left < ample and self.at_hand:
            held = self.at_hand.popleft()()
            if held is not None and held.value is not None:
                left += held.value.nbytes
                self.spool.put(held.name, held.value)
                held.value = None
        give_back()
        if self.room.left() <= 0:
            self.spool.settle()
            give_back()
        self.room.check()
