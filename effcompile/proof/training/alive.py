"""The measuring side of a peak: bytes of every tensor that can be reached from a model and its inputs, found
by the garbage collector.

It shares nothing with the plan: neither the captured graph nor the walk over parameters and buffers that
planning counts.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from effcompile.backends.torch.training import StepRunner
from effcompile.core.torch_compat import is_fake

#: What belongs to the program and not to the model: walking on from it would reach every tensor of the
#: process. So does the step of an earlier plan, which a planned model has with it, and the table of ranks
#: that a distributed tensor's mesh has.
_NOT_OWNED = (
    type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, types.GeneratorType,
    StepRunner, DeviceMesh
)  # fmt: skip


def alive_bytes(device: str, *roots: Any) -> int:
    """Bytes of the distinct storages on a type of device that are reachable from `roots`; tensors' gradients
    are left out.

    Functions lead on to what they close over, not to their module's globals.
    """
    storages: dict[int, int] = {}
    seen: dict[int, Any] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _NOT_OWNED):
            continue
        seen[id(found)] = found
        if isinstance(found, torch.Tensor):
            waiting += vars(found).values() if hasattr(found, "__dict__") else ()
            if is_traceable_wrapper_subclass(found):
                # a distributed tensor has no memory but that of what it wraps
                waiting += [getattr(found, name) for name in found.__tensor_flatten__()[0]]
            elif found.device.type == device and found.layout is torch.strided and not is_fake(found):
                storage = found.untyped_storage()
                block = 512 if device == "cuda" else 1  # of torch's allocator there
                storages[storage.data_ptr() or storage._cdata] = -(-storage.nbytes() // block) * block
        elif isinstance(found, types.FunctionType):
            waiting += [*(found.__closure__ or ()), *(found.__defaults__ or ())]
        else:
            waiting += gc.get_referents(found)
    return sum(storages.values())
