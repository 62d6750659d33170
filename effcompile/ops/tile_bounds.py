"""What a closed form says of whole tiles: every element visible, or possibly some."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Bool grids [B or 1, 1, nq, nk].

    Attributes:
        every: all elements of the tile are visible and inside the matrix; exact.
        some: no tile with a visible element is False here.
        exact: `some` is True only where some element is visible.
        open: the form hides nothing.
    """

    every: Tensor
    some: Tensor
    exact: bool
    open: bool = False

    def and_(self, other: Bounds) -> Bounds:
        """The conjunction: two forms may each show elements of a tile, and none in common."""
        return Bounds(
            every=self.every & other.every, some=self.some & other.some, exact=self.open and other.exact
        )


def band_bounds(
    lo: int | None,
    hi: int | None,
    block_q: int,
    block_k: int,
    q_len: int,
    k_len: int,
    *,
    device: torch.device,
) -> Bounds:
    """lo ≤ j − i ≤ hi: j − i runs from (first key − last query) to (last key − first query)."""
    (q0, q1), (k0, k1) = _span(q_len, block_q, device), _span(k_len, block_k, device)
    least, most = k0 - q1[:, None], k1 - q0[:, None]
    every = ((q1 - q0 + 1) == block_q)[:, None] & ((k1 - k0 + 1) == block_k)
    some = torch.ones_like(every)
    if lo is not None:
        every, some = every & (least >= lo), some & (most >= lo)
    if hi is not None:
        every, some = every & (most <= hi), some & (least <= hi)
    empty = lo is not None and hi is not None and lo > hi
    return Bounds(
        every=every[None, None],
        some=(some & (not empty))[None, None],
        exact=True,
        open=lo is None and hi is None,
    )


def chunk_bounds(
    chunk: int, block_q: int, block_k: int, q_len: int, k_len: int, *, device: torch.device
) -> Bounds:
    """Chunks are consecutive: a tile sees one when the ranges of its queries' and keys' chunks meet."""
    (q0, q1), (k0, k1) = _span(q_len, block_q, device), _span(k_len, block_k, device)
    return _ranges(*(t[None] // chunk for t in (q0, q1, k0, k1)), exact=True)


def id_bounds(q_ids: Tensor, k_ids: Tensor, block_q: int, block_k: int, q_len: int, k_len: int) -> Bounds:
    """Documents, by the range of ids in a tile; ranges may meet and share no id."""
    q, k = _cut(q_ids, q_len, block_q), _cut(k_ids, k_len, block_k)
    return _ranges(q.amin(2), q.amax(2), k.amin(2), k.amax(2), exact=False)


def valid_bounds(valid: Tensor, block_q: int, block_k: int, q_len: int, k_len: int) -> Bounds:
    """Padding: the same for every query."""
    keys = _cut(valid, k_len, block_k)
    rows = -(-q_len // block_q)
    every, some = (t[:, None, None, :].expand(-1, -1, rows, -1) for t in (keys.all(2), keys.any(2)))
    return Bounds(every=every, some=some, exact=True)


def _ranges(q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor, *, exact: bool) -> Bounds:
    """Equality of labels that run from x0 to x1 in a tile, [B or 1, n] each."""
    q0, q1, k0, k1 = q0[:, :, None], q1[:, :, None], k0[:, None], k1[:, None]
    every = (q0 == q1) & (k0 == k1) & (q0 == k0)
    return Bounds(every=every[:, None], some=((q0 <= k1) & (k0 <= q1))[:, None], exact=exact)


def _span(length: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last element of each tile along an axis."""
    first = torch.arange(0, length, block, device=device)
    return first, (first + block).clamp(max=length) - 1


def _cut(values: Tensor, length: int, block: int) -> Tensor:
    """[B, S] as [B, tiles, block]; the last tile is filled up with the last element, which changes no range,
    any or all.
    """
    padded = torch.arange(-(-length // block) * block, device=values.device).clamp(max=length - 1)
    return values[:, padded].unflatten(1, (-1, block))
