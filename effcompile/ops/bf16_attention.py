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

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from effcompile.core.types import Shape
from effcompile.machine.instructions import bf16_isas
from effcompile.machine.native import library
from effcompile.ops.cached_attention import mask_strides, masks_so
from effcompile.ops.instruction_sets import (
    ARGUMENT,
    LINE,
    POINTER,
    at_line,
    best_of,
    whose,
    why_torch,
    with_tiles,
)
from effcompile.ops.torch_attention import runs_in

__all__ = ["bf16_attention", "by_torch", "fallback_reason", "sizes_of", "told", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("attention_tiles.cpp")
_SIX, _THREE = ctypes.c_int64 * 6, ctypes.c_int64 * 3
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


class AttentionTiles:
    """The compiled kernel."""

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled, or the system does not give the tiles."""
        self.isa, self.instead = isa, instead
        found = with_tiles(library(_SOURCE, {}, isa))
        self.floats, self.call = found.scratch_floats, found.attention_tiles
        self.floats.argtypes, self.floats.restype = (_SIX,), ARGUMENT
        self.call.argtypes = (
            *(POINTER,) * 5,
            _SIX,
            *(_THREE,) * 5,
            *(ARGUMENT,) * 3,
            ctypes.c_float,
            POINTER,
            ARGUMENT,
        )
        self.call.restype = None

    def room(self, query: Tensor, key: Tensor) -> int:
        """Bytes of scratch."""
        return 4 * int(self.floats(sizes_of(query, key))) * torch.get_num_threads() + LINE

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        """See `bf16_attention_on_cpu`. The result lies in memory as (B, S, H, D)."""
        batch, heads, queries, width = query.shape
        made = torch.empty((batch, queries, heads, width)).transpose(1, 2)
        sizes, threads = sizes_of(query, key), torch.get_num_threads()
        scratch = torch.empty(self.room(query, key), dtype=torch.uint8, device="cpu")
        strides = (0, 0, 0) if mask is None else mask_strides(mask)
        self.call(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
            made.data_ptr(), sizes, _THREE(*query.stride()[:3]), _THREE(*key.stride()[:3]),
            _THREE(*value.stride()[:3]), _THREE(*made.stride()[:3]), _THREE(*strides),
            mask is not None and mask.dtype is torch.float32, is_causal,
            query.dtype is torch.bfloat16, scale, at_line(scratch), threads,
        )  # fmt: skip
        return made

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


def sizes_of(query: Tensor, key: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """As the kernels are told them: batch, heads, groups, queries, keys, width."""
    batch, heads, queries, width = map(int, query.shape)
    return _SIX(batch, heads, key.shape[1], queries, key.shape[2], width)


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
    found = kernels()
    mask = _expanded(mask, query, key)
    if isinstance(found, str) or not _fits(query, key, value, mask):
        return by_torch(query, key, value, mask, is_causal, scale)
    return found.attention(
        query, key, value, mask, is_causal, query.shape[3] ** -0.5 if scale is None else scale
    )


_LIBRARY.impl("bf16_attention", bf16_attention_on_cpu, "CPU")
bf16_attention = torch.ops.effcompile.bf16_attention


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask of four axes, one row for each query, its keys side by side: one that says the same of all keys
    of a query is written out.
    """
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(*mask.shape[:2], query.shape[2], key.shape[2])
    return mask.contiguous() if mask.stride(3) != 1 else mask


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes them."""
    dense = query.stride(3) == key.stride(3) == value.stride(3) == 1
    same = key.shape == value.shape and key.shape[3] == query.shape[3] and not query.shape[1] % key.shape[1]
    masked = mask is None or masks_so(mask, query.shape[2], key.shape[2])
    whole = query.dtype is key.dtype is value.dtype and query.dtype in (torch.float32, torch.bfloat16)
    return dense and same and masked and whole and min(*query.shape, *key.shape) > 0


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
        mask = mask.to(dtype)
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
    found = kernels()
    if isinstance(found, str):
        size = 2 if runs_in(torch.bfloat16) else 4
        mask = args[3] if len(args) > 3 else None
        masked = size * int(mask.numel()) if isinstance(mask, Tensor) else 0
        rows, keys = min(_TORCH_ROWS, int(query.shape[2])), min(_TORCH_KEYS, int(key.shape[2]))
        scores = torch.get_num_threads() * rows * (6 * keys + 8 * int(query.shape[3]) + 16)
        return size * int(3 * query.numel() + key.numel() + value.numel()) + masked + scores
    return found.room(query, key)
