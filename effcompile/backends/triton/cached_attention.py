"""Attention over a cache of keys and values, and rows appended to it, on kernels of their own: what
`ops/cached_attention.py` and `ops/append.py` ask first on a device, once `register` has been called.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from effcompile.backends.triton.configs import interpreting
from effcompile.backends.triton.kernels.cached_attention import (
    append_rows,
    cached_attention_part,
    cached_attention_whole,
)
from effcompile.backends.triton.layout import cdiv, next_power_of_2, on
from effcompile.backends.triton.places import runs
from effcompile.ops import elsewhere
from effcompile.ops.cache_rows import SCALE
from effcompile.ops.cached_attention import mask_strides, masks_so

__all__ = ["attend", "register", "write"]

#: Queries that share a head of keys, and elements of a row, that one program holds.
_MOST, _WIDEST = 64, 256
#: Parts that keys are split into at the most; processors of a GPU that is not here.
_PARTS, _PROCESSORS = 64, 132
_HALVES = (torch.float16, torch.bfloat16)


def register(device: str) -> None:
    """Ask these kernels first on this type of device."""
    elsewhere.put("cached_attention", device, attend)
    elsewhere.put("append_rows", device, write)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """See `ops.cached_attention`; None for what the kernels do not take: many queries, wide heads, another
    mask. Rows that no query sees are not read.
    """
    if not takes(query, key, value, mask):
        return None
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    made = query.new_empty((batch, queries, heads, width)).transpose(1, 2)
    shared, places = heads // groups, batch * groups
    block_n, launch = _tile(query.dtype, key.dtype, width)
    span, count = _split(cdiv(keys, block_n), places, query.device)
    rows, block_d = shared * queries, max(16, next_power_of_2(width))
    k_scales, v_scales = (_scales(each) for each in (key, value))
    parts, tops, sums = (
        (None, None, None)
        if count == 1
        else (
            query.new_empty((places, count, rows, *more), dtype=torch.float32) for more in ((width,), (), ())
        )
    )
    with on(query):
        cached_attention_part[(places, count)](
            query, key, value, k_scales, v_scales, mask, made, parts, tops, sums,
            query.stride()[:3], key.stride()[:3], value.stride()[:3],
            (0, 0, 0) if mask is None else mask_strides(mask), made.stride()[:3],
            groups, shared, queries, keys, span * block_n, scale, width,
            mask is not None and mask.dtype is torch.bool, max(16, next_power_of_2(rows)), block_n, block_d,
            _precision(query.dtype), **launch,
        )  # fmt: skip
        if count > 1:
            cached_attention_whole[(places, rows)](
                parts, tops, sums, made, made.stride()[:3], groups, shared, queries, count, width,
                next_power_of_2(count), block_d, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return made


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels do."""
    batch, heads, queries, width = query.shape
    coded = key.dtype is torch.int8
    few = 0 < queries * heads // key.shape[1] <= _MOST and batch * key.shape[2] > 0 and width <= _WIDEST
    held = key.dtype is value.dtype and key.dtype in (query.dtype, *_HALVES, torch.int8)
    fits = key.shape == value.shape and key.shape[3] == width + (SCALE if coded else 0)
    whole = not coded or all(_has_scales(each) for each in (key, value))
    dense = query.stride(3) == key.stride(3) == value.stride(3) == 1
    known = query.dtype in (torch.float32, *_HALVES)
    masked = mask is None or masks_so(mask, queries, key.shape[2], (torch.bool, torch.float32, query.dtype))
    return (
        few
        and held
        and fits
        and whole
        and dense
        and known
        and masked
        and runs("cached_attention", query.device)
    )


def write(longer: Tensor, new: Tensor, first: int | Tensor) -> bool:
    """New rows (B, G, S, D) into rows (B, G, K, D) of a cache behind its first `first` ones, as it holds
    them; False where the kernel does not take them. A tensor says `first` without the host.
    """
    width, coded = new.shape[3], longer.dtype is torch.int8
    known = (torch.float32, *_HALVES)
    fits = longer.shape[3] == width + (SCALE if coded else 0) and new.shape[:2] == longer.shape[:2]
    held = (not coded or _has_scales(longer)) and (coded or longer.dtype in known) and new.dtype in known
    if not (fits and held and longer.stride(3) == 1 and runs("cached_attention", new.device)):
        return False
    new = new if new.stride(3) == 1 else new.contiguous()
    batch, groups, rows, _ = new.shape
    place, first = (first, 0) if isinstance(first, Tensor) else (None, first)
    if batch * groups * rows:
        with on(new):
            append_rows[(batch * groups, rows)](
                new, longer, _scales(longer), place, new.stride()[:3], longer.stride()[:3], groups, rows,
                first, width, next_power_of_2(width), num_warps=1, enable_fp_fusion=True,
            )  # fmt: skip
    return True


def _scales(held: Tensor) -> Tensor | None:
    """Rows of codes as scales, whose own stand at the row's last place; of other rows none."""
    return held.view(torch.float32)[..., -1:] if held.dtype is torch.int8 else None


def _has_scales(held: Tensor) -> bool:
    """Whether codes lie so that they can be read as scales."""
    steps = (held.shape[3], held.storage_offset(), *held.stride()[:3])
    return held.stride(3) == 1 and all(step % SCALE == 0 for step in steps)


def _tile(query: torch.dtype, held: torch.dtype, width: int) -> tuple[int, dict[str, object]]:
    """(keys of a program's step, options of a launch): what fits into registers (see test_triton_aot.py)."""
    if interpreting():
        return 32, {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    coded, wide = held is torch.int8, query is torch.float32
    block_n = 64 if width <= 128 and not coded and not wide else 32
    return block_n, {"num_warps": 8 if coded and wide else 4, "num_stages": 2, "enable_fp_fusion": True}


def _split(blocks: int, places: int, device: torch.device) -> tuple[int, int]:
    """(blocks of keys of a part, parts): two programs for each processor of the GPU."""
    wanted = 3 if interpreting() else cdiv(2 * _processors(device), places)
    span = cdiv(blocks, max(1, min(wanted, _PARTS, blocks)))
    return span, cdiv(blocks, span)


@cache
def _processors(device: torch.device) -> int:
    there = device.type == "cuda" and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if there else _PROCESSORS


def _precision(dtype: torch.dtype) -> str | None:
    """How fp32 is multiplied."""
    if dtype is not torch.float32:
        return None
    return "ieee" if interpreting() or torch.version.hip else "tf32x3"
