"""PyTorch's flash attention on a CPU, and in which dtypes it runs here."""

from __future__ import annotations

from functools import cache

import torch

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def runs_in(dtype: torch.dtype) -> bool:
    """Whether the kernel runs in this dtype.

    It packs bf16 where oneDNN has products of it, with instructions that $ATEN_CPU_CAPABILITY may have taken
    from torch alone: "pack_vnni2 is only supported when avx512 is supported" (torch 2.13, Intel with AMX).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    x = torch.zeros(1, 1, 64, 16, dtype=dtype)  # the least that is packed, by any number of threads
    try:
        out, lse = FORWARD(x, x, x)
        BACKWARD(x, x, x, x, out, lse, 0.0, False)
    except RuntimeError:
        return False
    return True
