"""Who sees whom in an attention: closed forms of masks, recovered from dense ones, and the tiles that they
leave to visit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effcompile.core.mask import Mask
from effcompile.ops.tile_bounds import Bounds, band_bounds, chunk_bounds, id_bounds, valid_bounds
from effcompile.ops.tiles import TileList, check_blocks, once

#: Elements that are looked at in one go when candidate tiles are checked one by one (bounds the memory of
#: `tiles`).
_AT_ONCE = 1 << 22
#: How many queries are compared before all are.
_SAMPLE = 32
#: In which order a form is relieved of what it does not need. Padding goes last: of two forms of one row, it
#: is what was meant.
_DROPS: tuple[tuple[str, Any], ...] = (("lo", None), ("hi", None), ("chunk", 0), ("valid", None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility(Mask[Tensor, Tensor, int]):
    """A mask of tensors and numbers: as it is at certain sizes."""

    def dense(self, batch: int, q_len: int, k_len: int) -> Tensor:
        """The mask as bool [batch, H or 1, q_len, k_len]; axes on which nothing depends are expanded."""
        seen = self.rows(torch.arange(q_len, device=self._device), k_len).unsqueeze(1)
        return (seen if self.mask is None else seen & self.mask).expand(batch, -1, -1, -1)

    def rows(self, i: Tensor, k_len: int) -> Tensor:
        """What the closed forms (not `mask`) show of the queries i, int64 [n]: bool [B or 1, n, k_len]."""
        own = max([1, *(t.shape[0] for t in (self.q_ids, self.k_ids, self.valid) if t is not None)])
        b, j = torch.arange(own, device=i.device), torch.arange(k_len, device=i.device)
        seen = torch.ones((own, len(i), k_len), dtype=torch.bool, device=i.device)
        for term in self.terms(b[:, None, None], i[:, None], j):
            seen &= term
        return seen

    def tiles(self, block_q: int, block_k: int, *, q_len: int, k_len: int) -> TileList:
        """The tile lists, equal to `TileList.from_dense` of the dense mask, which is not built where closed
        forms say it all.
        """
        check_blocks(block_q, block_k)
        if self.mask is not None or not q_len or not k_len:
            return TileList.from_dense(self.dense(self._batch, q_len, k_len), block_q, block_k)
        bounds = self._bounds(block_q, block_k, q_len, k_len)
        full = bounds.every
        partial = bounds.some & ~full
        if not bounds.exact:
            partial = self._seen_in(partial, block_q, block_k, q_len, k_len)
        return TileList.from_grids(partial, full, q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k)

    def terms(self, b: Tensor, i: Tensor, j: Tensor) -> Iterator[Tensor]:
        """Each closed form at the elements (b, i, j), int64 indices that broadcast; `mask` is not
        among them.
        """
        if self.lo is not None:
            yield j >= i + self.lo
        if self.hi is not None:
            yield j <= i + self.hi
        if self.chunk:
            yield i // self.chunk == j // self.chunk
        if self.q_ids is not None and self.k_ids is not None:
            yield (
                self.q_ids[b.clamp(max=self.q_ids.shape[0] - 1), i]
                == self.k_ids[b.clamp(max=self.k_ids.shape[0] - 1), j]
            )
        if self.valid is not None:
            yield self.valid[b.clamp(max=self.valid.shape[0] - 1), j]

    @property
    def _batch(self) -> int:
        """Batches that see otherwise; 1 where all see the same."""
        return max(
            [1, *(t.shape[0] for t in (self.q_ids, self.k_ids, self.valid, self.mask) if t is not None)]
        )

    @property
    def _device(self) -> torch.device:
        return next(
            (t.device for t in (self.q_ids, self.valid, self.mask) if t is not None), torch.device("cpu")
        )

    def _bounds(self, block_q: int, block_k: int, q_len: int, k_len: int) -> Bounds:
        sizes = (block_q, block_k, q_len, k_len)
        bounds = band_bounds(self.lo, self.hi, *sizes, device=self._device)
        if self.chunk:
            bounds = bounds.and_(chunk_bounds(self.chunk, *sizes, device=self._device))
        if self.q_ids is not None and self.k_ids is not None:
            bounds = bounds.and_(id_bounds(self.q_ids, self.k_ids, *sizes))
        if self.valid is not None:
            bounds = bounds.and_(valid_bounds(self.valid, *sizes))
        return bounds

    def _seen_in(self, grid: Tensor, block_q: int, block_k: int, q_len: int, k_len: int) -> Tensor:
        """Those of the tiles in `grid` (bool [B, 1, nq, nk]) in which some element is visible, by looking at
        the elements.
        """
        sure = torch.zeros_like(grid)
        for part in grid.nonzero().split(max(1, _AT_ONCE // (block_q * block_k))):
            b, _, row, column = (index[:, None, None] for index in part.unbind(1))
            i = row * block_q + torch.arange(block_q, device=grid.device)[:, None]
            j = column * block_k + torch.arange(block_k, device=grid.device)
            seen = (i < q_len) & (j < k_len)
            for term in self.terms(b, i.clamp(max=q_len - 1), j.clamp(max=k_len - 1)):
                seen = seen & term
            sure[tuple(part.unbind(1))] = seen.flatten(1).any(1)
        return sure


def recover(dense: Tensor) -> Visibility:
    """The closed form with the fewest terms that equals a bool mask, else the mask itself as
    `Visibility.mask`.

    Args:
        dense: bool [B or 1, H or 1, Sq, Sk], True = may be seen; leading axes may be left out.
    """
    mask = _distinct(dense.reshape((1,) * (4 - dense.dim()) + tuple(dense.shape)))
    if not mask.numel() or bool(mask.all()):
        return Visibility()
    if mask.shape[1] == 1:
        for form in _candidates(mask[:, 0]):
            if _equals(form, mask):
                return _fewest(form, mask)
    return Visibility(mask=mask)


def _distinct(mask: Tensor) -> Tensor:
    """Without the batches and heads that all say the same."""
    mask = once(mask)
    for axis in (0, 1):
        first = mask.narrow(axis, 0, min(1, mask.shape[axis]))
        if mask.shape[axis] > 1 and torch.equal(mask, first.expand_as(mask)):
            mask = first
    return mask


def _candidates(mask: Tensor) -> Iterator[Visibility]:
    """Forms whose every term is the tightest that holds on all that is visible in bool [B, Sq, Sk]: if one
    fits, the mask has that form.
    """
    valid = mask.any(1)
    if not bool(valid.any()):
        yield Visibility(valid=valid)
        return
    first, last, some = _ends(mask)
    offset = torch.arange(mask.shape[1], device=mask.device)
    lo, hi = int((first - offset)[some].min()), int((last - offset)[some].max())
    band = Visibility(lo=lo, hi=hi, valid=None if bool(valid.all()) else _distinct_rows(valid))
    yield band
    uncrossed = _uncrossed(first, last, some, mask.shape[2])
    chunk = _chunk(uncrossed.all(0))
    if chunk:
        yield replace(band, chunk=chunk)
    q_ids, k_ids = _ids_of_first_keys(mask, first, some)
    yield replace(band, q_ids=q_ids, k_ids=k_ids)
    ids = _distinct_rows(uncrossed.cumsum(1))
    yield replace(
        band, q_ids=ids[:, : mask.shape[1]].contiguous(), k_ids=ids[:, : mask.shape[2]].contiguous()
    )


def _ends(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and last visible key of each query and whether there is one, [B, Sq]. numpy's argmax stops at the
    first True.
    """
    array = mask.cpu().numpy()
    first = torch.from_numpy(array.argmax(-1)).to(mask.device)
    last = mask.shape[2] - 1 - torch.from_numpy(array[..., ::-1].argmax(-1)).to(mask.device)
    return first, last, mask.gather(-1, first.unsqueeze(-1)).squeeze(-1)


def _uncrossed(first: Tensor, last: Tensor, some: Tensor, k_len: int) -> Tensor:
    """Bool [B, max(Sq, Sk)]: no visible element joins a position before p with one at p or after it."""
    q_len = first.shape[1]
    length = max(q_len, k_len)
    first = torch.nn.functional.pad(first.where(some, length), (0, length - q_len), value=length)
    last = torch.nn.functional.pad(last.where(some, -1), (0, length - q_len), value=-1)
    after = first.flip(1).cummin(1).values.flip(1)  # the first key that any query from p on sees
    # the last key that any query before p sees
    before = torch.nn.functional.pad(last.cummax(1).values, (1, -1), value=-1)
    p = torch.arange(length, device=first.device)
    return (after >= p) & (before < p)


def _chunk(uncrossed: Tensor) -> int:
    """The smallest c of which every multiple is a position that nothing crosses; 0 where there is none."""
    uncrossed = uncrossed.cpu()
    return next((c for c in uncrossed.nonzero().flatten().tolist() if c and bool(uncrossed[::c].all())), 0)


def _ids_of_first_keys(mask: Tensor, first: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
    """Documents named by the first key that their queries see; queries and keys that see nobody have names of
    their own.
    """
    seen = mask.any(1)
    # of each key, its first query
    seer = torch.from_numpy(mask.transpose(1, 2).contiguous().cpu().numpy().argmax(-1)).to(mask.device)
    k_ids = first.gather(1, seer).where(seen, -1)
    return _distinct_rows(first.where(some, -2)), _distinct_rows(k_ids)


def _distinct_rows(rows: Tensor) -> Tensor:
    """[B, S], with B = 1 where all rows are the same."""
    return rows[:1] if torch.equal(rows, rows[:1].expand_as(rows)) else rows


def _equals(form: Visibility, mask: Tensor) -> bool:
    """The form is this mask [B, 1, Sq, Sk], element by element.

    A sample of the rows refuses most forms at once.
    """
    batch, _, q_len, k_len = mask.shape
    sample = torch.arange(0, q_len, max(1, q_len // _SAMPLE), device=mask.device)
    if not torch.equal(form.rows(sample, k_len).expand(batch, -1, -1), mask[:, 0, sample]):
        return False
    return torch.equal(form.dense(batch, q_len, k_len), mask)


def _fewest(form: Visibility, mask: Tensor) -> Visibility:
    """Without the terms that the others imply."""
    for name, nothing in _DROPS:
        slimmer = replace(form, **{name: nothing})
        if getattr(form, name) is not nothing and _equals(slimmer, mask):
            form = slimmer
    return form
