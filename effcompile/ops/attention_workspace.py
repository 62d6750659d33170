"""What the attention operators allocate while they run on a CPU, beyond their arguments and results: an upper
bound from shapes.

What is in masks, ids and tiles is not read: where they decide how much is visited, everything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from effcompile.core.types import Kwargs
from effcompile.ops.attention_flash import rows_per_span
from effcompile.ops.attention_kernel import EMPTY_SCORES, SCORES, rows_per_block, shape_of
from effcompile.ops.attention_terms import Terms
from effcompile.ops.sums import sum_dtype
from effcompile.ops.torch_attention import runs_in

_FORM = {f.name for f in fields(Terms)}


def workspace_bytes(name: str, args: Sequence[object], kwargs: Kwargs) -> int | None:
    """Bytes alive at the highest instant inside `attention` or `attention_backward`, at most; None for other
    operators.

    `args`, `kwargs`: the operator's arguments, tensors real or fake; those left at their defaults may be
    missing.
    """
    if name not in ("effcompile::attention", "effcompile::attention_backward"):
        return None
    given: list[Any] = list(args)
    backward = name.endswith("backward")
    grad = given[0] if backward else None
    q, k, v, *rest = [*given[1:4], *given[6:]] if backward else given
    # tiles: their block sizes suffice
    terms = Terms.of(*rest[:6], **{key: value for key, value in kwargs.items() if key in _FORM})
    sizes = _Sizes(q, k, v, terms, listed=len(rest) > 6 and bool(rest[6]))
    derives_bias = backward and terms.bias is not None and kwargs.get("bias_gradient", True)
    flash = not terms.softcap and q.shape[3] == v.shape[3] and not derives_bias and runs_in(q.dtype)
    body = sizes.flash(backward=backward) if flash else sizes.tiled(backward=backward, most=SCORES)
    if backward and terms.uniform_empty and terms.sink is None:
        body = max(body, sizes.tiled(backward=True, most=EMPTY_SCORES))
    copies = sum(x.numel() * x.element_size() for x in (q, k, v, grad) if x is not None and not _reads(x))
    return copies + body + sizes.around(backward=backward)


def _reads(x: Tensor) -> bool:
    return bool(x.stride(3) == 1) and bool(x.stride(2) >= x.shape[3])


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what the kernels allocate: e per element of q, w per score."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    listed: bool

    @property
    def w(self) -> int:
        return sum_dtype(self.q).itemsize

    @property
    def narrow(self) -> bool:
        return self.q.dtype != sum_dtype(self.q)

    @property
    def rows(self) -> int:
        """B · H · Sq."""
        return int(self.q.shape[0] * self.q.shape[1] * self.q.shape[2])

    def around(self, *, backward: bool) -> int:
        """Per row: lse, its copies and flags; in a backward the sums of gradients of k and v, and what a
        sink's gradient needs.
        """
        per_row = self.rows * (4 * self.w + 2)
        if not backward:
            return per_row
        sums = (self.k.numel() + self.v.numel()) * self.w if self.narrow else 0
        delta = self.rows * int(self.v.shape[3]) * self.w * (2 if self.narrow else 1)
        terms = sum(t.numel() * self.w * 2 for t in (self.terms.bias, self.terms.sink) if t is not None)
        return per_row + sums + delta + terms

    def flash(self, *, backward: bool) -> int:
        """Masks, results of one call, gathered keys, and the kernel's own buffers."""
        b, _, sq, sk = shape_of(self.q, self.k)
        e, of_keys = self.q.element_size(), (self.k.numel() + self.v.numel()) * self.q.element_size()
        results = self.q.numel() * e + ((of_keys if b > 1 else 2 * of_keys) if backward else 0)
        gathered = of_keys if self.listed else 0
        return results + gathered + self._masks(sq, sk, backward) + self._buffers(sq, sk, backward)

    def _masks(self, sq: int, sk: int, backward: bool) -> int:
        terms = self.terms
        rows = rows_per_span(
            shape_of(self.q, self.k), terms, int(self.q.shape[3]), 256 if backward and self.narrow else 64
        )
        rows = min(max(rows, terms.block_q if self.listed else 0), sq)
        band = (
            sq + sk
            if terms.lo is None or terms.hi is None
            else min(sq + sk, max(0, int(terms.hi) - int(terms.lo)) + rows)
        )
        found = rows * band * (self.w + 4) if terms.lo is not None or terms.hi is not None else 0
        flagged = [t for t in (terms.mask, terms.q_ids, terms.valid) if t is not None]
        if flagged or terms.chunk or self.listed:
            lead = max((int(t.shape[0]) for t in flagged), default=1) * (
                1 if terms.mask is None else int(terms.mask.shape[1])
            )
            found += lead * rows * sk * (self.w + 8)
        if terms.bias is not None:
            lead = int(terms.bias.shape[0] * terms.bias.shape[1])
            # of a causal or full call
            whole = terms.bias.numel() * self.w if terms.bias.dtype != sum_dtype(self.q) else 0
            found += max(whole, 2 * lead * rows * sk * self.w)
        return found

    def _buffers(self, sq: int, sk: int, backward: bool) -> int:
        """Source: pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: per thread, blocks of scores
        and of rows; packed operands.
        """
        rows, cols = min(256, sq), min(512, sk)
        blocks = (
            (4 if backward else 1) * rows * cols + 4 * rows + (3 * rows + 3 * cols) * int(self.q.shape[3])
        )
        packed = (
            (self.k.numel() + self.v.numel() + self.q.numel()) * self.q.element_size() if self.narrow else 0
        )
        return torch.get_num_threads() * blocks * self.w * (2 if self.narrow else 1) + packed

    def tiled(self, *, backward: bool, most: int) -> int:
        """Blocks of scores and their like, and rows and keys in the wide dtype."""
        b, h, sq, sk = shape_of(self.q, self.k)
        rows = max(rows_per_block((b, h, sq, sk), self.terms, most), self.terms.block_q if self.listed else 0)
        scores = min(max(most, h * min(rows, sq) * sk), b * h * sq * sk)
        flat = (self.k.numel() + self.v.numel()) * self.w
        stacks = flat * (2 if backward else 1) + 4 * self.q.numel() // max(1, sq) * min(rows, sq) * self.w
        more = 1 + (self.terms.softcap > 0) + (self.terms.bias is not None) if backward else 0
        return scores * (self.w * (2 + more) + 2) + stacks
