"""Whether random masks in 16 bits are the same numbers as in fp32 on this machine."""

from __future__ import annotations

from functools import cache

import torch


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
