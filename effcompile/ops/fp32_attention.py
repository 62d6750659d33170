"""Attention of fp32 tensors on a CPU, exact, where they lie: softmax(q kᵀ · scale + mask) v.

The kernel of `fp32_attention.cpp` reads heads as linears made them, side by side, and writes them so; a mask
of bools as it is. What it does not take, and where nothing can be compiled, is torch's
`scaled_dot_product_attention`. Defined without torch.library.custom_op, as `int8_linear` is.
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
from effcompile.machine.instructions import best_isa
from effcompile.machine.native import library
from effcompile.ops import tape
from effcompile.ops.cached_attention import mask_strides
from effcompile.ops.instruction_sets import (
    ARGUMENT,
    LINE,
    POINTER,
    WORDS,
    at_line,
    best_of,
    whose,
    why_torch,
)
from effcompile.ops.tape import KernelTold, Made, Scratch, TapeValue

__all__ = ["by_torch", "fallback_reason", "fp32_attention", "isas", "told", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("fp32_attention.cpp")
_TOLD, _FOUR = ctypes.c_int64 * 19, ctypes.c_int64 * 4
_NONE = _FOUR(0, 0, 0, 1)
_ARGUMENTS = (*(POINTER,) * 5, _TOLD, _FOUR, *(ARGUMENT,) * 2, ctypes.c_float, POINTER, ARGUMENT)
#: dtype of a mask → how the kernel names it.
_MASKS = {torch.bool: 1, torch.float32: 2}
#: Queries and keys that torch's kernel takes at once, at most.
_TORCH_ROWS, _TORCH_KEYS = 256, 512

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "fp32_attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, "
    "float? scale=None) -> Tensor"
)


def isas() -> tuple[str, ...]:
    """The instruction sets that it is compiled for here, the fastest first."""
    best = best_isa()
    found = {"avx512_bf16": ("avx512", "avx2"), "avx512": ("avx512", "avx2"), "generic": ()}
    return found.get(best, (best,))


@functools.cache
def kernels() -> AttentionRows | str:
    """The best kernel that this machine runs, or why there is none."""
    return best_of(AttentionRows, isas())


def fallback_reason() -> str | None:
    """Why torch computes these attentions; None where the kernel does."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernel computes these attentions here, for a report."""
    return whose(kernels())


class AttentionRows:
    """The compiled kernel of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    source = _SOURCE
    #: dtype of query, key and value → the function that takes these.
    names: ClassVar = {torch.float32: "fp32_attention"}

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled."""
        self.isa, self.instead = isa, instead
        found = self._library(isa)
        self.floats = found.scratch_floats
        self.floats.argtypes, self.floats.restype = (_TOLD,), ARGUMENT
        self.calls = {dtype: getattr(found, name) for dtype, name in self.names.items()}
        for call in self.calls.values():
            call.argtypes, call.restype = _ARGUMENTS, None

    def _library(self, isa: str) -> ctypes.CDLL:
        return library(self.source, {"WIDTH": WORDS[isa]}, isa)

    def room(self, told: ctypes.Array[ctypes.c_int64]) -> int:
        """Bytes of scratch."""
        return 4 * int(self.floats(told)) * torch.get_num_threads() + LINE

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        """See `fp32_attention_on_cpu`. The result lies in memory as (B, S, H, E)."""
        told = _told_of(self, query, key, value)
        assert told is not None, "the kernel takes these"
        return self.run(told, query, key, value, mask, is_causal, scale)

    def run(
        self,
        told: ctypes.Array[ctypes.c_int64],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        """The same of tensors that `told` is of."""
        batch, heads, queries, wide = told[0], told[1], told[3], told[6]
        made = torch.empty_strided(
            (batch, heads, queries, wide), (*told[16:19], 1), dtype=torch.float32, device="cpu"
        )
        scratch = torch.empty(self.room(told), dtype=torch.uint8, device="cpu")
        self.calls[query.dtype](
            query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
            made.data_ptr(), told, _NONE if mask is None else _FOUR(*mask_strides(mask), mask.stride(3)),
            0 if mask is None else _MASKS[mask.dtype], is_causal, scale, at_line(scratch),
            torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole tiles and rests, groups, several blocks of keys,
        masks of bools and of numbers, a row that sees nothing.
        """
        wave = lambda step, *shape: (torch.arange(math.prod(shape)) * step).sin().view(shape)  # noqa: E731
        query, key, value = wave(0.7, 2, 4, 61, 40), wave(0.3, 2, 2, 530, 40), wave(0.9, 2, 2, 530, 24)
        seen = torch.arange(2 * 61 * 530).view(2, 1, 61, 530) % 7 != 3
        seen[0, 0, 5] = False
        for mask, causal in ((None, False), (None, True), (seen, False), (wave(0.5, 2, 4, 61, 530), False)):
            found = self.attention(query, key, value, mask, causal, 0.3)
            right = by_torch(query, key, value, mask, causal, 0.3)
            if not torch.allclose(found, right, rtol=1e-4, atol=1e-5):
                return f"the compiled {self.isa} kernel gave a wrong attention"
        return None


def _told_of(
    found: AttentionRows, query: Tensor, key: Tensor, value: Tensor
) -> ctypes.Array[ctypes.c_int64] | None:
    """What the kernel is told of them; None where it does not take them."""
    if query.dtype not in found.calls or not query.dtype is key.dtype is value.dtype:
        return None
    shapes = query.shape, key.shape, value.shape
    return _told(*shapes, query.stride(), key.stride(), value.stride())


@functools.lru_cache(maxsize=1 << 10)
def _told(
    query: Shape, key: Shape, value: Shape, of_query: Shape, of_key: Shape, of_value: Shape
) -> ctypes.Array[ctypes.c_int64] | None:
    """Of shapes and strides, kept: what is asked of a tensor in Python takes longer than to look it up."""
    batch, heads, queries, width = query
    groups, keys, wide = key[1], key[2], value[3]
    dense = of_query[3] == of_key[3] == of_value[3] == 1
    same = key[:3] == value[:3] and key[3] == width and key[0] == batch
    if not (dense and same) or min(*query, *key, wide) <= 0 or heads % groups:
        return None
    strides = (*of_query[:3], *of_key[:3], *of_value[:3], queries * heads * wide, wide, heads * wide)
    return _TOLD(batch, heads, groups, queries, keys, width, wide, *strides)


def fp32_attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(B, H, S, E), for query (B, H, S, D), key (B, G, K, D) and value (B, G, K, E) with H a multiple of G.

    `mask` (B or 1, H or 1, S or 1, K): a bool that says what is seen, or numbers that are added. `is_causal`:
    query i sees keys up to i. A query that sees nothing gets zeros, as by `scaled_dot_product_attention`.
    """
    made = by_kernel(kernels(), query, key, value, mask, is_causal, scale)
    return by_torch(query, key, value, mask, is_causal, scale) if made is None else made


def by_kernel(
    found: AttentionRows | str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """The same by that kernel; None where there is none or it does not take them."""
    if isinstance(found, str) or (mask is not None and not _takes(mask, query, key)):
        return None
    told = _told_of(found, query, key, value)
    if told is None:
        return None
    seen = mask
    if mask is not None:
        seen = _rows_of(mask, query, key)
        seen = seen if _is_read(seen) else seen.contiguous()
    factor = told[5] ** -0.5 if scale is None else scale
    return found.run(told, query, key, value, seen, is_causal, factor)


_LIBRARY.impl("fp32_attention", fp32_attention_on_cpu, "CPU")
fp32_attention = torch.ops.effcompile.fp32_attention


class HeldAttention:
    """`fp32_attention` of heads that lie side by side in what linears made, as they make them: a step of a
    tape (tape.py).
    """

    __name__, pair = "fp32_attention", False

    #: The operator, and its kernel.
    _run, _kernels = staticmethod(fp32_attention_on_cpu), staticmethod(kernels)

    def __init__(
        self, heads: int, groups: int, width: int, wide: int, is_causal: bool, scale: float | None
    ) -> None:
        """`heads` queries of `width` columns, `groups` keys of as many and values of `wide`."""
        self._heads = (heads, width), (groups, width), (groups, wide)
        self._causal, self._scale = is_causal, scale

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, S, H·E), for query (B, S, H·D), key (B, K, G·D) and value (B, K, G·E)."""
        q, k, v = (
            each.unflatten(-1, heads).transpose(1, 2)
            for each, heads in zip((query, key, value), self._heads, strict=True)
        )
        made = self._run(q, k, v, mask, self._causal, self._scale)
        return made.transpose(1, 2).flatten(2)

    def told(
        self, threads: int, query: TapeValue, key: TapeValue, value: TapeValue, mask: TapeValue | None = None
    ) -> KernelTold | None:
        kernel, given = self._kernels(), (query, key, value)
        apart = [_apart(each, *heads) for each, heads in zip(given, self._heads, strict=True)]
        call = None if isinstance(kernel, str) else kernel.calls.get(query.dtype)
        if isinstance(kernel, str) or call is None or not query.dtype is key.dtype is value.dtype:
            return None
        told = _told(*(shape for shape, _ in apart), *(strides for _, strides in apart))
        strides = _NONE if mask is None or told is None else _read_as(mask, told)
        if told is None or strides is None:
            return None
        number = told[5] ** -0.5 if self._scale is None else self._scale
        arguments = (
            *given, mask, Made, ctypes.addressof(told), ctypes.addressof(strides),
            0 if mask is None else _MASKS[mask.dtype], int(self._causal), Scratch(), threads,
        )  # fmt: skip
        return KernelTold(
            kind=tape.ATTENTION, function=call, arguments=arguments, number=number,
            shape=(told[0], told[3], told[1] * told[6]), scratch=kernel.room(told), keeps=(told, strides),
        )  # fmt: skip


def _apart(value: TapeValue, heads: int, width: int) -> tuple[Shape, Shape]:
    """Shape and strides of heads (B, H, S, D) in a value (B, S, H·D)."""
    (batch, rows, _), (of_batch, of_row, of_column) = value.shape, value.strides
    return (batch, heads, rows, width), (of_batch, width * of_column, of_row, of_column)


def _read_as(mask: TapeValue, told: ctypes.Array[ctypes.c_int64]) -> ctypes.Array[ctypes.c_int64] | None:
    """The strides of a mask (B or 1, H or 1, S or 1, K) that the kernel reads as it lies: keys side by side,
    or bools that are one for all keys. None of another.
    """
    axes = 4 - len(mask.shape)
    if axes < 0 or mask.dtype not in _MASKS:
        return None
    shape, strides = (1,) * axes + tuple(mask.shape), (0,) * axes + tuple(mask.strides)
    fits = all(size in (1, of) for size, of in zip(shape[:3], (told[0], told[1], told[3]), strict=True))
    read = strides[3] == 1 or (strides[3] == 0 and mask.dtype is torch.bool)
    if not fits or shape[3] != told[4] or not read:
        return None
    return _FOUR(
        *(0 if size == 1 else step for size, step in zip(shape[:3], strides, strict=False)), strides[3]
    )


def _takes(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether it is of a dtype that the kernel knows, and of a shape that says which scores it is for."""
    wanted = (*query.shape[:3], key.shape[2])
    fits = all(size in (1, of) for size, of in zip(mask.shape[::-1], wanted[::-1], strict=False))
    return mask.dtype in _MASKS and 2 <= mask.dim() <= 4 and fits


def _rows_of(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A view of four axes, with a row for each query."""
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:2], query.shape[2], key.shape[2])


def _is_read(rows: Tensor) -> bool:
    """Whether the kernel reads them as they lie: keys side by side, or bools that are one for all keys."""
    return rows.stride(3) == 1 or (rows.stride(3) == 0 and rows.dtype is torch.bool)


def by_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The same by torch, heads side by side too."""
    gqa = query.shape[1] != key.shape[1]
    made = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
    )
    return made.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.register_fake("effcompile::fp32_attention", lib=_LIBRARY)
def _(query, key, value, mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, rows, heads, value.shape[3])).transpose(1, 2)


@register_flop_formula(torch.ops.effcompile.fp32_attention)
def flops(query_shape: Shape, key_shape: Shape, value_shape: Shape, *args: object, **kwargs: object) -> int:
    heads = query_shape[1]
    shared = [(shape[0], heads, *shape[2:]) for shape in (key_shape, value_shape)]
    return int(sdpa_flop_count(query_shape, *shared))


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: what its kernel holds of scores for each thread (aten/native/cpu/FlashAttentionKernel.cpp), and
    a mask of bools as numbers.
    """
    if name != "effcompile::fp32_attention" or not isinstance(args, (list, tuple)):
        return None
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    found = by_kernel_bytes(kernels(), query, key, value, mask)
    return _by_torch_bytes(query, key, value, mask) if found is None else found


def by_kernel_bytes(
    found: AttentionRows | str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> int | None:
    """Bytes inside `by_kernel`; None where that is."""
    told = None if isinstance(found, str) else _told_of(found, query, key, value)
    if isinstance(found, str) or told is None:
        return None
    if mask is None:
        return found.room(told)
    if not _takes(mask, query, key):
        return None
    rows = _rows_of(mask, query, key)
    return found.room(told) + (0 if _is_read(rows) else rows.element_size() * int(rows.numel()))


def _by_torch_bytes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> int:
    batch, heads, queries, width = map(int, query.shape)
    keys, wide, size = int(key.shape[2]), int(value.shape[3]), query.element_size()
    added = 0 if mask is None else size * int(mask.numel())
    if width == wide and query.stride(3) == key.stride(3) == value.stride(3) == 1:
        rows = min(_TORCH_ROWS, queries)
        per_thread = rows * (min(_TORCH_KEYS, keys) + 2 + width)
        return size * torch.get_num_threads() * per_thread + added
    repeated = heads * keys * (width + wide)
    return size * batch * (heads * queries * (3 * keys + width + wide) + 2 * repeated) + added
