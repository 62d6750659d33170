"""The launches that are compiled without a GPU: calls of the kernels' launchers on tensors without data."""

from __future__ import annotations

from typing import Any

import torch

from effcompile.backends.triton import attention
from effcompile.backends.triton.configs import Config, using
from effcompile.ops.attention_terms import Terms

#: Causal, 4:1 grouped heads: the case that the facts and the published figures are for.
_SHAPE = (2, 16, 4, 4096)  # batch, heads, key heads, length


def attention_launches(
    *, dtype: str, d: int, kernel: str, config: dict[str, Any], terms: dict[str, Any] | None = None, tensors: tuple[str, ...] = ()
) -> None:
    """Forward and backward of attention of head size d, `kernel` with this configuration.

    `terms` are numbers of `Terms`, causal where none are given; `tensors` names those of its tensors that there are.
    """
    made = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    b, h, heads, s = _SHAPE
    q, grad = (torch.empty((b, h, s, d), dtype=made, device="meta") for _ in range(2))
    k, v = (torch.empty((b, heads, s, d), dtype=made, device="meta") for _ in range(2))
    shapes = {"bias": ((1, h, s, s), made), "sink": ((h,), made), "mask": ((b, 1, s, s), torch.bool), "valid": ((b, s), torch.bool),
              "q_ids": ((b, s), torch.int64), "k_ids": ((b, s), torch.int64)}  # fmt: skip
    there: dict[str, Any] = {name: torch.empty(shapes[name][0], dtype=shapes[name][1], device="meta") for name in tensors}
    given = Terms(scale=d**-0.5, **there, **({"hi": 0} if terms is None else terms))
    with using(**{kernel: Config(**config)}):
        if kernel == "forward":
            attention.forward(q, k, v, given)
        else:
            out, lse = torch.empty_like(q), torch.empty((b, h, s), device="meta")
            attention.backward(grad, q, k, v, out, lse, given)
