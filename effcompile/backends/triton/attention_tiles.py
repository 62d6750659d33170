"""Which attention the tiled kernels take, with which tiles, and the lists of tiles that they walk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from effcompile.backends.triton.configs import (
    KERNELS,
    LaunchConfig,
    architecture,
    candidates,
    here,
    shared_memory,
)
from effcompile.backends.triton.layout import WIDEST
from effcompile.backends.triton.places import runs
from effcompile.ops.attention_terms import Terms
from effcompile.ops.mask import TILES
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility

__all__ = ["NARROWEST", "Lists", "closed_form", "declines", "given_lists", "options"]

#: The smallest side of a tile that tensor cores take.
NARROWEST = 16


def options(
    kernel: str, device: torch.device, dtype: torch.dtype, d: int, dv: int
) -> tuple[LaunchConfig, ...]:
    """What the kernel can be launched with on a device."""
    if device.type != "cuda":
        return candidates(kernel, None, dtype, d, dv)
    arch = architecture(device)
    return () if arch is None else candidates(kernel, arch, dtype, d, dv, shared_memory(device), here(device))


def declines(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, backward: bool = False) -> str | None:
    """None, or why these arguments are not for the tiled kernels.

    It hangs on shapes, strides, dtypes, devices and numbers alone.
    """
    if not runs("attention", q.device):
        return "the kernels are not for this GPU"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{q.dtype} has no tensor-core kernel"
    if not all(q.shape) or not k.shape[3] or not v.shape[3]:
        return f"an empty q {tuple(q.shape)} or width of v {v.shape[3]}"
    if not terms.scale > 0:
        return f"a scale of {terms.scale}, which is not positive"
    for name, block in (("block_q", terms.block_q), ("block_k", terms.block_k)):
        if terms.tiles and math.gcd(block, 2**20) < NARROWEST:
            return f"{name} {block} is no multiple of {NARROWEST}"
    if not all(options(kernel, q.device, q.dtype, q.shape[3], v.shape[3]) for kernel in KERNELS):
        return f"no tile of head size {max(q.shape[3], v.shape[3])} in {q.dtype} fits this GPU"
    for name, term in (("bias", terms.bias), ("mask", terms.mask)):
        if term is not None and max(term.stride()[2:]) > WIDEST:
            return f"rows or columns of {name} that are more than {WIDEST} elements apart"
    if (
        backward
        and terms.uniform_empty
        and not terms.fills
        and terms.sink is None
        and (terms.softcap or terms.bias is not None)
    ):
        return "rows that see nothing have gradients through the softcap or bias"
    return None


@dataclass(frozen=True, slots=True)
class Lists:
    """What a kernel walks: four tensors, their strides in rows of the lists per batch and head, and the
    lists' tile in elements.
    """

    tensors: Sequence[Tensor]
    strides: tuple[int, int]
    block_m: int
    block_n: int


def given_lists(tiles: Sequence[Tensor], terms: Terms, q_len: int, k_len: int, *, transposed: bool) -> Lists:
    """The lists that a call brings, or their transposed ones, which are made where it brings only four."""
    found = tiles[:4]
    if transposed and len(tiles) == 8:
        found = tiles[4:]
    elif transposed:
        whole = TileList(
            q_len=q_len,
            k_len=k_len,
            block_q=terms.block_q,
            block_k=terms.block_k,
            **dict(zip(TILES, tiles, strict=True)),
        )
        found = whole.tensors()[4:]
    b, h, rows = found[0].shape
    strides = (h * rows if b > 1 else 0, rows if h > 1 else 0)
    return Lists([t.contiguous() for t in found], strides, terms.block_q, terms.block_k)


@lru_cache(maxsize=256)
def closed_form(
    lo: int | None, hi: int | None, chunk: int, q_len: int, k_len: int, block_q: int, block_k: int,
    device: torch.device, within: bool, transposed: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The four lists of band and chunk, the same for every batch and head.

    `within`: every tile asks other terms, too.
    """
    tiles = Visibility(lo=lo, hi=hi, chunk=chunk).tiles(block_q, block_k, q_len=q_len, k_len=k_len)
    if within:
        both = tiles.partial | tiles.full
        tiles = TileList.from_grids(
            both, torch.zeros_like(both), q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k
        )
    return tuple(t.to(device).contiguous() for t in tiles.tensors()[4 * transposed :][:4])
