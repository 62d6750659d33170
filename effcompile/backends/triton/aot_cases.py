"""The launches that are compiled without a GPU: calls of the kernels' launchers on tensors without data."""

from __future__ import annotations

from typing import Any

import torch

from effcompile.backends.triton import (
    attention_calls,
    block_sparse,
    cached_attention,
    compress,
    group_linear,
    group_quant,
    loss_head,
    rows,
    states8,
)
from effcompile.backends.triton.configs import LaunchConfig, using
from effcompile.ops.attention_terms import Terms
from effcompile.ops.loss_head import MEAN

#: Causal, 4:1 grouped heads: the case that the facts and the published figures are for.
_SHAPE = (2, 16, 4, 4096)  # batch, heads, key heads, length


def attention_launches(
    *, dtype: str, d: int, kernel: str, config: dict[str, Any], terms: dict[str, Any] | None = None,
    tensors: tuple[str, ...] = (), shape: tuple[int, int, int, int] = _SHAPE,
) -> None:  # fmt: skip
    """Forward and backward of attention of head size d, `kernel` with this configuration.

    `terms` are numbers of `Terms`, causal where none are given; `tensors` names those of its tensors that
    there are.
    """
    made = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    b, h, heads, s = shape
    q, grad = (torch.empty((b, h, s, d), dtype=made, device="meta") for _ in range(2))
    k, v = (torch.empty((b, heads, s, d), dtype=made, device="meta") for _ in range(2))
    shapes = {
        "bias": ((1, h, s, s), made),
        "sink": ((h,), made),
        "mask": ((b, 1, s, s), torch.bool),
        "valid": ((b, s), torch.bool),
        "q_ids": ((b, s), torch.int64),
        "k_ids": ((b, s), torch.int64),
    }
    there: dict[str, Any] = {
        name: torch.empty(shapes[name][0], dtype=shapes[name][1], device="meta") for name in tensors
    }
    given = Terms(scale=d**-0.5, **there, **({"hi": 0} if terms is None else terms))
    with using(**{kernel: LaunchConfig(**config)}):
        if kernel == "forward":
            attention_calls.forward(q, k, v, given)
        else:
            out, lse = torch.empty_like(q), torch.empty((b, h, s), device="meta")
            attention_calls.backward(attention_calls.AttentionCall.of(q, k, v, given, ()), grad, out, lse)


def cached_attention_launches(
    *, dtype: str = "bf16", held: str = "bf16", d: int = 128, keys: int = 4096, batch: int = 1
) -> None:
    """A token's attention over a cache, grouped 4:1 and padded, as in Llama 8B; its row appended."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
    query, new = _made(batch, 32, 1, d, dtype=kinds[dtype]), _made(batch, 8, 1, d, dtype=kinds[dtype])
    room = _made(batch, 8, 8192, d + 4 * (held == "int8"), dtype=kinds[held])
    rows = room[:, :, :keys]
    cached_attention.write(rows, new, keys - 1)
    mask = _made(batch, 1, 1, keys, dtype=torch.bool)
    cached_attention.attend(query, rows, rows, mask, d**-0.5)


def loss_head_launches(*, softcap: bool = False) -> None:
    """The loss head's three kernels, in bf16."""
    x, weight, target = _made(8192, 2048), _made(32000, 2048), _made(8192, dtype=torch.int64)
    form = (MEAN, -100, 1.0, 30.0, softcap, 8)
    _, lse = loss_head.forward(x, weight, None, target, *form)
    loss_head.backward(_made(dtype=torch.float32), x, weight, None, target, lse, *form, [True, True, False])
    loss_head.gradients(x, weight, None, target, *form, [True, True, False])


def block_sparse_launches(*, block: int) -> None:
    """The two products and the sampled one, in bf16."""
    side, blocks = 4096 // block, (4096 // block) ** 2 // 10
    x, values = _made(8192, 4096), _made(blocks, block, block)
    ptr, index = _made(side + 1, dtype=torch.int32), _made(blocks, dtype=torch.int32)
    kernels = block_sparse.BlockSparseKernels()
    kernels.linear(x, values, ptr, index, None)
    kernels.grad_values(x, x, ptr, index)


def group_linear_launches(*, bits: int, rows: int = 1, n: int = 4096) -> None:
    """A linear with a weight in groups of 32, of a decoded token or of some rows."""
    weight = _made(n // 16, 4096 // 32, 32 + 64 * bits, dtype=torch.uint8)
    x, bias = _made(rows, 4096, dtype=torch.float32), _made(n, dtype=torch.float32)
    group_linear.linear(x, weight, n, bias, "silu")


def group_quant_launches(*, weight: str, rows: int = 64) -> None:
    """A quantised linear: `weight` int4, int8 or fp8 with bf16 rows and groups of 128, or "int8x8", "fp8x8";
    and what makes such codes.
    """
    n, k = 4096, 4096
    both, one = weight.endswith("x8"), torch.float8_e4m3fn if weight.startswith("fp8") else torch.int8
    codes = _made(n, k // 2, dtype=torch.uint8) if weight == "int4" else _made(n, k, dtype=one)
    x, x_scales = (
        (_made(rows, k, dtype=one), _made(rows, 1, dtype=torch.float32)) if both else (_made(rows, k), None)
    )
    scales = _made(n, 1 if both else k // 128, dtype=torch.float32)
    group_quant.linear(x, codes, scales, x_scales, _made(n), _made(rows, n), "gelu", torch.bfloat16)
    group_quant.dequantize(*group_quant.quantize(_made(rows, k), 128, torch.float8_e4m3fn), torch.bfloat16)


def compress_launches() -> None:
    """Values of bf16 in 8 bits, and back."""
    x = _made(8192, 2048)
    compress.decompress(compress.compress(x, [2048, 1]), [8192, 2048], [2048, 1], torch.bfloat16)


def states8_launches() -> None:
    """A step of AdamW and one of Lion, bf16 parameters."""
    p, codes, table = _made(1 << 20), _made(1 << 20, dtype=torch.uint8), _made(256, dtype=torch.float32)
    scale = _made(1 << 12, dtype=torch.float32)
    states8.adam(p, p, codes, scale, codes, scale, table, table, 1e-3, 0.9, 0.99, 0.1, 1e-8, 3, True)
    states8.lion(p, p, codes, scale, table, 1e-3, 0.9, 0.99, 0.1)


def rows_launches(*, width: int = 4096) -> None:
    """A norm with its residual sum, one alone and its backward, a gate on the halves of one product, a
    rotation: bf16, as in Llama 8B.
    """
    x, both, angles = _made(4096, width), _made(4096, 28672), _made(1, 4096, 128)
    rows.norm(x, x, _made(width), 1e-5)
    rows.norm_alone(x, _made(width), 1e-5)
    rows.norm_backward(x, x, x, _made(width), _made(4096, 1, dtype=torch.float32))
    rows.swiglu(both[:, :14336], both[:, 14336:])
    rows.swiglu_backward(both, both, both)
    rows.rotary(_made(1, 4096, 32, 128).transpose(1, 2), angles, angles, False)


def _made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
