"""Attention over a cache, whose queries may share heads of keys and values, and whose rows may be narrower
than its queries.

Few queries run in the compiled kernel (`cached_attention.cpp`): keys and values are read once, as they are
held. Many, or what it does not take, are torch's: `scaled_dot_product_attention`, which repeats heads and
wants one dtype.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.machine.instructions import bf16_isas, integer_isas
from effcompile.machine.native import library
from effcompile.ops import elsewhere
from effcompile.ops.cache_rows import as_numbers, held_width, into
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of, with_tiles

_SOURCE = Path(__file__).with_name("cached_attention.cpp")
#: dtype of a cache → how the kernel names it.
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
#: Instruction set → words of a vector; of tiles those of what stands beside them.
WIDTHS = {**WORDS, "amx_bf16": 16}
_SIX, _THREE = ctypes.c_int64 * 6, ctypes.c_int64 * 3
#: Queries of one row that the kernel takes at once, and all that share a head of keys; keys of one task.
FEW, MOST, _SPAN = 8, 512, 256
#: Keys whose rows are held as fp32 at once.
_DENSE = 64


def isas() -> tuple[str, ...]:
    """Those that this machine has, the fastest first: tiles for rows in 16 bits and fewer."""
    return (*(isa for isa in bf16_isas() if isa == "amx_bf16"), *integer_isas())


@functools.cache
def kernels() -> AttentionKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(AttentionKernels, isas())


class AttentionKernels:
    """The compiled kernel of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled, or the system keeps its registers."""
        self.isa, self.instead = isa, instead
        found = library(_SOURCE, {"WIDTH": WIDTHS[isa]}, isa)
        self.call = (with_tiles(found) if isa == "amx_bf16" else found).cached_attention
        self.call.argtypes = (
            *(POINTER,) * 5,
            _SIX,
            *(_THREE,) * 4,
            ARGUMENT,
            ARGUMENT,
            ARGUMENT,
            ctypes.c_float,
            POINTER,
            ARGUMENT,
        )
        self.call.restype = None

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """See `cached_attention`. The result lies in memory as (B, S, H, D)."""
        batch, heads, queries, width = query.shape
        groups, keys = key.shape[1], key.shape[2]
        shared, threads = heads // groups, torch.get_num_threads()
        made = query.new_empty((batch, queries, heads, width))
        narrow = any(FORMS[held.dtype] for held in (key, value))
        floats = scratch_floats(batch * groups, shared * queries, keys, width, threads, narrow=narrow)
        scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
        strides = (0, 0, 0) if mask is None else mask_strides(mask)
        self.call(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
            made.data_ptr(), _SIX(batch, groups, shared, queries, keys, width), _THREE(*query.stride()[:3]),
            _THREE(*key.stride()[:3]), _THREE(*value.stride()[:3]), _THREE(*strides), FORMS[key.dtype],
            FORMS[value.dtype], mask is not None and mask.dtype is torch.float32, scale, scratch.data_ptr(),
            threads,
        )  # fmt: skip
        return made.transpose(1, 2)

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors, tiles and rests, all forms of a cache,
        masks of bools and of numbers.
        """
        wave = lambda step, *shape: (torch.arange(math.prod(shape)) * step).sin().view(shape)  # noqa: E731
        seen = torch.arange(2 * 2 * 75).view(2, 1, 2, 75) % 7 != 3
        masks = (None, seen, wave(0.5, 2, 6, 2, 75))
        for (at, of_key), of_value, width in itertools.product(enumerate(FORMS), FORMS, (40, 64)):
            query = wave(0.7, 2, 6, 2, width)
            k, v = (
                into(wave(step, 2, 2, 75, width), of).to(of) for step, of in ((0.3, of_key), (0.9, of_value))
            )
            mask = masks[at % 3]
            if not torch.allclose(
                self.attention(query, k, v, mask, 0.3), by_torch(query, k, v, mask, 0.3), rtol=1e-4, atol=3e-5
            ):
                return f"the compiled {self.isa} kernel gave a wrong attention"
        return None


def scratch_floats(heads: int, queries: int, keys: int, width: int, threads: int, *, narrow: bool) -> int:
    """Floats that the kernel needs, for so many heads of keys and queries of each. `narrow`: keys or values
    are not held as fp32.

    Of a thread: scores of a span, and rows of it that are narrow, which tiles hold with queries and weights,
    beside what tiles make. Of each span: what is put together in the end.
    """
    wide, columns = -(-min(keys, _SPAN) // 32) * 32, -(-width // 32) * 32
    laid = (-(-queries // 8) * 8 + wide // 4 * 3) * columns + max(16 * columns, 1024)
    own = -(-queries * wide // 16) * 16 + (max(laid, min(keys, _DENSE) * columns) if narrow else 0)
    return 16 + threads * own + heads * -(-keys // _SPAN) * queries * (width + 2)


def mask_strides(mask: Tensor) -> tuple[int, int, int]:
    """Of (batch, heads, queries): 0 where there is one for all."""
    found = tuple(mask.stride(axis) if mask.shape[axis] > 1 else 0 for axis in range(3))
    return found[0], found[1], found[2]


def masks_so(
    mask: Tensor, queries: int, keys: int, dtypes: Sequence[torch.dtype] = (torch.bool, torch.float32)
) -> bool:
    """Whether the kernel takes a mask: bools or numbers (B or 1, H or 1, queries, keys), keys side by
    side.
    """
    side_by_side = mask.dim() == 4 and mask.stride(3) == 1 and mask.shape[2:] == (queries, keys)
    return side_by_side and mask.dtype in dtypes


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, (B, H, S, D), for query (B, H, S, D), key and value (B, G, K, D) with H
    a multiple of G.

    Keys and values, each by itself, are in its dtype, in bf16, or in 8 or 4 bits with scales behind each row
    (cache_rows.py).
    `mask` (B or 1, H or 1, S, K): a bool that says what is seen, or numbers that are added.
    """
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if (own := elsewhere.kernel("cached_attention", query)) is not None:
        made: Tensor | None = own(query, key, value, mask, factor)
        return by_torch(query, key, value, mask, scale) if made is None else made
    if not _fits(query, key, value, mask) or isinstance(found := kernels(), str):
        return by_torch(query, key, value, mask, scale)
    return found.attention(query, key, value, mask, factor)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes them."""
    queries, heads, groups = query.shape[2], query.shape[1], key.shape[1]
    few = 0 < queries <= FEW and queries * heads // groups <= MOST and query.shape[0] * key.shape[2] > 0
    held = key.shape[:3] == value.shape[:3] and all(
        each.dtype in FORMS and each.shape[3] == held_width(query.shape[3], each.dtype)
        for each in (key, value)
    )
    dense = query.stride(3) == key.stride(3) == value.stride(3) == 1
    masked = mask is None or masks_so(mask, queries, key.shape[2])
    return few and held and dense and masked and query.dtype is torch.float32 and not query.is_cuda


def by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same by torch.

    The queries of a group are rows of one product where there is one of each: keys are read once then.
    Narrower rows are widened head by head.
    """
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    if (key.dtype != query.dtype or value.dtype != query.dtype) and groups > 1:
        made = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
        shared = heads // groups
        for at in range(groups):
            own = slice(at * shared, (at + 1) * shared)
            seen = mask if mask is None or mask.shape[1] == 1 else mask[:, own]
            one = slice(at, at + 1)
            made[:, own] = by_torch(query[:, own], key[:, one], value[:, one], seen, scale)
        return made
    key, value = (
        (each if each.dtype.is_floating_point else as_numbers(each)).to(query.dtype) for each in (key, value)
    )
    if query.is_cuda and rows != 1 and mask is not None:
        # with fewer heads of keys and a mask torch holds all scores
        key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
        groups = heads
    if rows != 1 or heads == groups:
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=heads != groups
        )
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])
    packed = query.reshape(batch, groups, heads // groups, width)
    attended: Tensor = F.scaled_dot_product_attention(packed, key, value, mask, scale=scale)
    return attended.reshape(batch, heads, 1, width)
