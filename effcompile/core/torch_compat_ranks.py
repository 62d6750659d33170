"""What effcompile takes of torch.distributed that is not documented, in one place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Never

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.distributed_c10d import Store

from effcompile.core import torch_compat_aot
from effcompile.core.errors import UsageError

#: Attributes in which torch notes what composable functions were applied to a module (REGISTRY_KEY of
#: torch.distributed._composable), and that DistributedDataParallel reads of what it is put around.
_REGISTRY, _IGNORED = REGISTRY_KEY, "_ddp_params_and_buffers_to_ignore"
_COUNT = getattr(torch._C, "_storage_Use_Count", None)
#: Seconds to wait for gloo's thread at the most: it is on its way, but a loaded machine may let it wait.
_PATIENCE = 1.0


def check_forked_autograd() -> None:
    """Make sure that this process, a forked one, may run a backward.

    Raises:
        UsageError: torch refuses it, for the process that it was forked from has threads for its devices.
    """
    try:
        torch_compat_aot.small_backward()
    except RuntimeError as error:
        raise UsageError(
            "Ranks of this machine are forked processes, in which torch runs no backward once autograd has "
            "threads for a GPU. Start anew in a process that sees none: CUDA_VISIBLE_DEVICES= before the "
            "command."
        ) from error


def gather_into(wholes: Sequence[Tensor], shards: Sequence[Tensor], group: ProcessGroup) -> None:
    """Every rank's shards, one after the other in each whole tensor, in one launch where the backend has
    that.
    """
    group.allgather_into_tensor_coalesced(list(wholes), list(shards)).wait()


def reduce_scatter_into(shards: Sequence[Tensor], wholes: Sequence[Tensor], group: ProcessGroup) -> None:
    """The rank's shard of the sum of each whole tensor, in one launch where the backend has that."""
    group.reduce_scatter_tensor_coalesced(list(shards), list(wholes)).wait()


@contextlib.contextmanager
def lent(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Tensors that a backend works on within: afterwards they are the caller's alone.

    gloo's thread lets go of a tensor a moment after its work is done, and as long as it does not, the memory
    cannot be freed.
    """
    if _COUNT is None:
        yield
        return
    storages = [tensor.untyped_storage() for tensor in tensors]
    before = [_COUNT(storage._cdata) for storage in storages]
    yield
    end = time.monotonic() + _PATIENCE
    for storage, count in zip(storages, before, strict=True):
        while _COUNT(storage._cdata) > count and time.monotonic() < end:
            time.sleep(0)


def holders(tensor: Tensor) -> int:
    """How many hold a tensor's memory."""
    return 0 if _COUNT is None else int(_COUNT(tensor.untyped_storage()._cdata))


def let_go(tensor: Tensor, count: int) -> None:
    """Wait until no more than `count` hold a tensor's memory, as in `lent`."""
    end = time.monotonic() + _PATIENCE
    while holders(tensor) > count and time.monotonic() < end:
        time.sleep(0)


class _Refusing(dict[str, object]):
    """Stands where torch notes what was put around a module, and raises where it looks for that."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def setdefault(self, key: str, default: object = None) -> Never:
        raise UsageError(self._words)

    def __iter__(self) -> Never:
        raise UsageError(self._words)


def refuse_wrappers(model: nn.Module, words: str) -> None:
    """Have fully_shard and replicate on a model or a part of it, and DistributedDataParallel around it, raise
    UsageError of these words.
    """
    for module in model.modules():
        vars(module)[_REGISTRY] = _Refusing(words)
    vars(model)[_IGNORED] = _Refusing(words)


def store() -> Store:
    """The rendezvous store of the processes: keys and values that all of them see."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


#: Seconds in which the other ranks notice that one fell out, too.
_NOTICE = 3.0


def missing(group: ProcessGroup) -> list[int]:
    """Of a group in which a collective failed, the ranks (global numbers) that do not say within moments that
    it failed for them.
    """
    others = {rank for rank in get_process_group_ranks(group) if rank != get_rank()}
    try:
        there = store()
        there.set(f"effcompile/noticed/{get_rank()}", "yes")
        end = time.monotonic() + _NOTICE
        while others and time.monotonic() < end:
            others = {rank for rank in others if not there.check([f"effcompile/noticed/{rank}"])}
            time.sleep(0.05)
    except RuntimeError:  # whoever kept the store is gone
        return [0] if 0 in others else sorted(others)
    return sorted(others)
