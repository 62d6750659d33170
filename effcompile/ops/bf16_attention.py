"""Attention of fp32 tensors whose two products are of bf16, with sums and softmax in fp32.

softmax(bf16(q) bf16(k)ᵀ · scale + mask) as bf16, times bf16(v). On a CPU with AMX or AVX512-BF16 the kernel
of `attention_tiles.cpp` runs; elsewhere torch's `scaled_dot_product_attention` of bf16 tensors. Defined
without torch.library.custom_op, as `int8_linear` is.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from effcompile.core.types import Shape
from effcompile.machine.instructions import bf16_isas
from effcompile.machine.native import library
from effcompile.ops import fp32_attention as exact
from effcompile.ops.instruction_sets import best_of, whose, why_torch, with_tiles
from effcompile.ops.tape import KernelTold, TapeValue
from effcompile.ops.torch_attention import runs_in

__all__ = ["bf16_attention", "by_torch", "fallback_reason", "told", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("attention_tiles.cpp")
#: Queries and keys that torch's kernel takes at once, at most.
_TORCH_ROWS, _TORCH_KEYS = 256, 512

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "bf16_attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, "
    "float? scale=None) -> Tensor"
)


@functools.cache
def kernels() -> AttentionTiles | str:
    """The kernel that this machine runs, or why there is none."""
    return best_of(AttentionTiles, isas) if (isas := bf16_isas()) else "this processor multiplies no bf16"


def fallback_reason() -> str | None:
    """Why torch computes these attentions; None where the kernel does."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernel computes these attentions here, for a report."""
    return whose(kernels())


class AttentionTiles(exact.AttentionRows):
    """The compiled kernel."""

    names: ClassVar = {torch.float32: "attention_tiles", torch.bfloat16: "attention_tiles_narrow"}

    def _library(self, isa: str) -> ctypes.CDLL:
        """Raises LoweringError where the system does not give the tiles, too."""
        return with_tiles(library(_SOURCE, {}, isa))

    def objection(self) -> str | None:
        """None, or that a result differs from torch's on the same rounded numbers: whole tiles and rests,
        groups, masks of bools and of numbers, a row that sees nothing.
        """
        wave = lambda step, *shape: (torch.arange(math.prod(shape)) * step).sin().view(shape)  # noqa: E731
        query, key, value = wave(0.7, 2, 4, 37, 40), wave(0.3, 2, 2, 70, 40), wave(0.9, 2, 2, 70, 40)
        seen = torch.arange(2 * 37 * 70).view(2, 1, 37, 70) % 7 != 3
        seen[0, 0, 5] = False
        for mask, causal in ((None, False), (None, True), (seen, False), (wave(0.5, 2, 4, 37, 70), False)):
            found = self.attention(query, key, value, mask, causal, 0.3)
            q, k, v = (each.bfloat16().float() for each in (query, key, value))
            right = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=0.3, enable_gqa=True
            )
            if not torch.allclose(found, right, rtol=1e-2, atol=4e-3):
                return f"the compiled {self.isa} kernel gave a wrong attention"
        return None


def bf16_attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(B, H, S, D) in fp32, for query (B, H, S, D), key and value (B, G, K, D) with H a multiple of G, in
    fp32 or bf16.

    `mask` (B or 1, H or 1, S or 1, K): a bool that says what is seen, or numbers that are added. A query that
    sees nothing gets zeros, as by `scaled_dot_product_attention`.
    """
    found: AttentionTiles | str = kernels() if key.shape == value.shape else "values are not as wide"
    made = exact.by_kernel(found, query, key, value, mask, is_causal, scale)
    return by_torch(query, key, value, mask, is_causal, scale) if made is None else made


_LIBRARY.impl("bf16_attention", bf16_attention_on_cpu, "CPU")
bf16_attention = torch.ops.effcompile.bf16_attention


class HeldTiles(exact.HeldAttention):
    """`bf16_attention` of heads that lie side by side in what linears made: a step of a tape (tape.py)."""

    __name__ = "bf16_attention"
    _run, _kernels = staticmethod(bf16_attention_on_cpu), staticmethod(kernels)

    def told(
        self, threads: int, query: TapeValue, key: TapeValue, value: TapeValue, mask: TapeValue | None = None
    ) -> KernelTold | None:
        fits = self._heads[1] == self._heads[2]  # values as wide as keys
        return super().told(threads, query, key, value, mask) if fits else None


def _result(query: Tensor) -> torch.dtype:
    """Of the attention: the query's, and fp32 of bf16."""
    return torch.float32 if query.dtype is torch.bfloat16 else query.dtype


def by_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The same by torch, which rounds the result to bf16, too; in fp32, of rounded numbers, where it has no
    such kernel.
    """
    dtype = torch.bfloat16 if runs_in(torch.bfloat16) else torch.float32
    q, k, v = (each.bfloat16().to(dtype) for each in (query, key, value))
    if mask is not None and mask.dtype is not torch.bool:
        some, mask = mask > -torch.inf, mask.to(dtype, copy=True)
        # the least number of fp32 stays a number
        mask.masked_fill_(some.logical_and_(mask == -torch.inf), torch.finfo(dtype).min)
    gqa = query.shape[1] != key.shape[1]
    made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return made.transpose(1, 2).contiguous().transpose(1, 2).to(_result(query))


@torch.library.register_fake("effcompile::bf16_attention", lib=_LIBRARY)
def _(query, key, value, mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    batch, heads, rows, _ = query.shape
    made = query.new_empty((batch, rows, heads, value.shape[3]), dtype=_result(query))
    return made.transpose(1, 2)


@register_flop_formula(torch.ops.effcompile.bf16_attention)
def _flops(query_shape: Shape, key_shape: Shape, value_shape: Shape, *args: object, **kwargs: object) -> int:
    heads = query_shape[1]
    shared = [(shape[0], heads, *shape[2:]) for shape in (key_shape, value_shape)]
    return int(sdpa_flop_count(query_shape, *shared))


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: narrow copies of everything, the narrow result and another copy of it, and no more than what
    its kernel holds of scores for each thread (aten/native/cpu/FlashAttentionKernel.cpp).
    """
    if name != "effcompile::bf16_attention" or not isinstance(args, (list, tuple)):
        return None
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    found = exact.by_kernel_bytes(kernels(), query, key, value, mask) if key.shape == value.shape else None
    if found is not None:
        return found
    size = 2 if runs_in(torch.bfloat16) else 4
    masked = 0 if mask is None else (size + 2) * int(mask.numel())
    rows, keys = min(_TORCH_ROWS, int(query.shape[2])), min(_TORCH_KEYS, int(key.shape[2]))
    scores = torch.get_num_threads() * rows * (6 * keys + 8 * int(query.shape[3]) + 16)
    return size * int(3 * query.numel() + key.numel() + value.numel()) + masked + scores
