"""The GPU that a model lies on: which it is, how long its work takes, and what torch's allocator holds there.

Every question is about the *current* device: whoever plans for a model asks within `current(place_of(...))`,
so that a model on the second of several GPUs is not measured on the first. ROCm's devices answer to the same
names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.core.timing import faster_half_median

__all__ = ["BLOCK", "current", "place_of", "rounded", "seconds", "undrawn"]

#: torch's CUDA allocator gives out memory in multiples of so many bytes (kMinBlockSize in
#: c10/core/CachingDeviceAllocator.h).
BLOCK = 512
#: A buffer that is written before each sample, so that operands are read from memory as in a model's step,
#: where other operators have run in between; while it is written, the host can say what comes next. At least
#: so many bytes, and several times the cache.
_LEAST_FLUSH, _CACHES = 64 << 20, 4
#: Samples of one figure.
_FEWEST, _MOST = 3, 40


def place_of(model: nn.Module | None, *inputs: object) -> torch.device:
    """Where a model's calls run: on the GPU of its first parameter or buffer, else of its inputs; else where
    these are, else on the CPU.
    """
    own = [] if model is None else [*model.parameters(), *model.buffers()]
    tensors = [t for t in (*own, *pytree.tree_leaves(inputs)) if isinstance(t, torch.Tensor)]
    return next(
        (t.device for t in tensors if t.device.type == "cuda"),
        tensors[0].device if tensors else torch.device("cpu"),
    )


def current(place: torch.device) -> AbstractContextManager[object]:
    """Within it, a GPU is the current device; nothing for other places."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def undrawn() -> AbstractContextManager[object]:
    """After it torch's generators, the CPU's and those of GPUs at work, are as they were before it: how much
    was drawn within goes by what was timed and kept, and a script that is seeded goes on from its seed.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=devices)


def rounded(nbytes: int) -> int:
    """What torch's CUDA allocator counts for a tensor of so many bytes."""
    return -(-nbytes // BLOCK) * BLOCK


def seconds(call: Callable[[], object], *, budget: float = 0.05, cold: bool = True) -> float:
    """Seconds that the GPU is busy with one call, by events around queued calls: the host's time counts only
    where the GPU waits for it.

    Args:
        call: what to time; it is called once untimed.
        budget: seconds that measuring may take, but for the fewest samples.
        cold: push the caches' contents out before each sample.
    """
    call()
    flush = _flusher() if cold else None
    torch.cuda.synchronize()
    start = perf_counter()
    samples = _samples(call, flush, 1)
    once = max(perf_counter() - start, 1e-6)
    samples = _samples(call, flush, max(_FEWEST, min(_MOST, int(budget / once))))
    return faster_half_median(samples)


def _samples(call: Callable[[], object], flush: torch.Tensor | None, count: int) -> list[float]:
    """Seconds of so many calls, all queued before the first is awaited."""
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for first, last in marks:
        if flush is not None:
            flush.zero_()
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    # events tick in half microseconds
    return [max(first.elapsed_time(last), 1e-4) / 1e3 for first, last in marks]


def _flusher() -> torch.Tensor | None:
    """A buffer of several times the GPU's cache; None where there is no room for one."""
    size = max(_LEAST_FLUSH, _CACHES * int(getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)))
    return torch.empty(size, dtype=torch.uint8, device="cuda") if 4 * size < _left() else None


def _left() -> int:
    """Bytes that may still be taken, less what torch's allocator holds already."""
    return int(torch.cuda.mem_get_info()[0])
