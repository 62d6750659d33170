"""What 16-bit arithmetic is worth on this machine: products timed beside fp32's, and whether random masks are the same numbers."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from effcompile.core import gpu

#: Rows, inner and columns of the product that is timed: large enough for the kernels of real layers, small enough to be emulated.
#: On a GPU, where small ones are a matter of launches, larger.
_SHAPE, _ON_GPU = (128, 512, 512), (4096, 2048, 2048)
_ROUNDS = 5


@cache
def product_ratio(dtype: torch.dtype, device: str) -> float:
    """Seconds of a product of matrices in `dtype` by those of the same in fp32; inf where there is none in it."""
    try:
        return _seconds(dtype, device) / _seconds(torch.float32, device)
    except RuntimeError:  # this build of torch has no such kernel
        return float("inf")


def _seconds(dtype: torch.dtype, device: str) -> float:
    rows, inner, columns = _SHAPE if device == "cpu" else _ON_GPU
    a, b = torch.ones(rows, inner, dtype=dtype, device=device), torch.ones(inner, columns, dtype=dtype, device=device)
    times = []
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if device == "cuda":
            return gpu.seconds(lambda: a @ b)
        for _ in range(1 + _ROUNDS):
            start = perf_counter()
            float((a @ b)[0, 0])  # waits for a device
            times.append(perf_counter() - start)
    return min(times[1:])


@cache
def draws_as_fp32(dtype: torch.dtype, device: str) -> bool:
    """Whether a dropout of `dtype` hides the elements that one of fp32 hides from the same seed."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    masks = []
    with torch.random.fork_rng(devices=devices):
        for wanted in (torch.float32, dtype):
            torch.manual_seed(0)
            masks.append(torch.nn.functional.dropout(torch.ones(4099, dtype=wanted, device=device)) != 0)
    return torch.equal(*masks)
