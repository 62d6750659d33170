"""A section of gpu.py: every tile that attention's kernels can be launched with, causal at 16k."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from _gpu_common import DEVICE, DRY, DTYPE, attempt, mine, say, seconds

from effcompile.backends.triton import attention_calls, attention_tiles
from effcompile.backends.triton.configs import KERNELS, LaunchConfig

#: Products of head size by visible pairs that a kernel makes, each of two operations.
_PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}


def tiles() -> None:
    """Each alone, those that copy whole tiles among them; what fails is said."""
    length, heads = (64, (2, 1)) if DRY else (16384, (16, 16))
    for d in (16,) if DRY else (128, 64):
        for kernel in KERNELS:
            for option in offered(kernel, d):
                if mine():
                    named = {name: value for name, value in asdict(option).items() if value is not None}
                    with attempt(f"tile {kernel} d{d}", tile=named):
                        run = attention_calls.trial(
                            kernel, option, torch.device(DEVICE), DTYPE, d, length=length,
                            heads=(heads[0] * 128 // max(d, 64), heads[1] * 128 // max(d, 64)),
                        )  # fmt: skip
                        took, count = seconds(run), heads[0] * 128 // max(d, 64)
                        flops = 2.0 * _PRODUCTS[kernel] * d * length * (length + 1) / 2 * count
                        say(case=f"tile {kernel} d{d}", tile=named, ms=took * 1e3, tflops=flops / took / 1e12)


def offered(kernel: str, d: int) -> list[LaunchConfig]:
    """All of the table, also where one of them was measured as the fastest."""
    found = list(attention_tiles.options(kernel, torch.device(DEVICE), DTYPE, d, d))
    return [*found, replace(found[0], tma=True)] if DRY else found
