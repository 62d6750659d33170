"""A GPU that is made up, for `gpu.py --dry`: the script's lines run as they stand, on the CPU and without a
compiler.

What torch.cuda is asked for is answered, CUDA graphs are no recordings, a timing is one call, and what
torch.compile makes is the function itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import triton.testing
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

#: Bytes that it has, and that any step is said to take of it.
SIZE, TAKEN = 1 << 34, 1 << 22
_QUIET = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction")
_TAKEN = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class Graph:
    """What was run once."""

    def replay(self) -> None:
        return None


def install() -> None:
    """For the rest of this process."""
    for name in _QUIET:
        setattr(torch.cuda, name, lambda *_: None)
    for name in _TAKEN:
        setattr(torch.cuda, name, lambda *_: TAKEN)
    torch.cuda.mem_get_info = lambda *_: (SIZE - TAKEN, SIZE)  # type: ignore[assignment]
    torch.cuda.get_per_process_memory_fraction = lambda *_: 1.0
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=SIZE)
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _recorded  # type: ignore[assignment,misc]
    triton.testing.do_bench = _once
    torch.compile = lambda function, **_: _dense if function is flex_attention else function


@contextlib.contextmanager
def _recorded(graph: Graph, **_: Any) -> Iterator[None]:
    yield


def _dense(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool
) -> Tensor:
    """FlexAttention, which has no backward on the CPU, on whole scores."""
    group = q.shape[1] // k.shape[1] if enable_gqa else 1
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores, (i, j) = q @ k.mT * scale, (torch.arange(n) for n in (q.shape[2], k.shape[2]))
    places = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), i[:, None], j[None]
    scores = scores if score_mod is None else score_mod(scores, *places)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*places), float("-inf"))
    return scores.softmax(3) @ v


def _once(run: Callable[[], Any], **_: Any) -> float:
    """Milliseconds of one call."""
    start = perf_counter()
    run()
    return 1e3 * (perf_counter() - start)
