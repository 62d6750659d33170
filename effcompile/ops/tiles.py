"""Which tiles of an attention's scores are visited: the block lists that the kernels walk, in the form of
FlexAttention's BlockMask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from effcompile.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileList:
    """The visited tiles of a score matrix [B, H, q_len, k_len], cut into tiles of block_q × block_k elements.

    A tile is *full* when it lies inside the matrix and every element of it is visible: a kernel need not mask
    it. It is *partial* when some element is visible and it is not full; so a tile that reaches beyond q_len
    or k_len is never full (FlexAttention's rule). Every other tile is *empty*, and is not listed. nq = ⌈q_len
    / block_q⌉, nk = ⌈k_len / block_k⌉.

    Attributes:
        q_len, k_len: rows and columns of the matrix, in elements.
        block_q, block_k: rows and columns of a tile, in elements.
        partial_count, full_count: int32 [B, H, nq], the number of such tiles in a row of tiles. B, H are 1
            where the lists broadcast.
        partial_index, full_index: int32 [B, H, nq, nk], their columns, ascending; zeros beyond the count.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor

    @classmethod
    def from_dense(cls, mask: Tensor, block_q: int, block_k: int) -> TileList:
        """The lists of a bool mask [B or 1, H or 1, Sq, Sk] (leading axes may be left out), True = visible.

        Raises:
            UsageError: the mask is not bool, has fewer than 2 or more than 4 axes, or a block size is not
                positive.
        """
        if mask.dtype is not torch.bool or not 2 <= mask.dim() <= 4:
            raise UsageError(
                f"A mask of {mask.dtype} with {mask.dim()} axes has no tiles: give bool, with 2 to 4 axes "
                "([B, H,] Sq, Sk)."
            )
        mask = once(mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)))
        q_len, k_len = mask.shape[-2:]
        check_blocks(block_q, block_k)
        seen = _folded(_folded(mask, 3, block_k, any_of=True), 2, block_q, any_of=True)
        full = _folded(_folded(mask, 3, block_k, any_of=False), 2, block_q, any_of=False)
        return cls.from_grids(seen & ~full, full, q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k)

    @classmethod
    def from_grids(
        cls, partial: Tensor, full: Tensor, *, q_len: int, k_len: int, block_q: int, block_k: int
    ) -> TileList:
        """The lists of two bool grids [B or 1, H or 1, nq, nk] that say which tiles are partial and which are
        full.
        """
        partial, full = torch.broadcast_tensors(partial, full)
        partial_count, partial_index = _listed(partial)
        full_count, full_index = _listed(full)
        return cls(
            q_len=q_len,
            k_len=k_len,
            block_q=block_q,
            block_k=block_k,
            partial_count=partial_count,
            partial_index=partial_index,
            full_count=full_count,
            full_index=full_index,
        )

    @property
    def partial(self) -> Tensor:
        """Bool grid [B, H, nq, nk] of the partial tiles."""
        return _grid(self.partial_count, self.partial_index, self.partial_index.shape[-1])

    @property
    def full(self) -> Tensor:
        """Bool grid [B, H, nq, nk] of the full tiles."""
        return _grid(self.full_count, self.full_index, self.full_index.shape[-1])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Empty, full and partial tiles; broadcast axes count once."""
        full, partial = int(self.full_count.sum()), int(self.partial_count.sum())
        return self.partial_index.numel() - full - partial, full, partial

    @property
    def visited(self) -> int:
        """Tiles that a kernel visits; broadcast axes count once."""
        return sum(self.counts[1:])

    @property
    def density(self) -> float:
        """Visited tiles over all tiles, 0 to 1; 0 where there are none."""
        return self.visited / max(1, self.partial_index.numel())

    def transposed(self) -> TileList:
        """The same tiles listed by columns: for each tile of keys, its tiles of queries. q and k have changed
        places.
        """
        return TileList.from_grids(
            self.partial.transpose(-1, -2),
            self.full.transpose(-1, -2),
            q_len=self.k_len,
            k_len=self.q_len,
            block_q=self.block_k,
            block_k=self.block_q,
        )

    def tensors(self) -> list[Tensor]:
        """What the kernels take: partial count, partial index, full count, full index; then the same four of
        `transposed()`.
        """
        other = self.transposed()
        return [
            tensor
            for t in (self, other)
            for tensor in (t.partial_count, t.partial_index, t.full_count, t.full_index)
        ]

    def to_block_mask(
        self, mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    ) -> BlockMask:
        """FlexAttention's form; `mask_mod(b, h, q, k)` decides inside the partial tiles (None: all of them is
        visible).
        """
        return BlockMask.from_kv_blocks(
            self.partial_count,
            self.partial_index,
            self.full_count,
            self.full_index,
            BLOCK_SIZE=(self.block_q, self.block_k),
            mask_mod=mask_mod,
            seq_lengths=(self.q_len, self.k_len),
        )


def once(tensor: Tensor) -> Tensor:
    """Leading axes (all but the last two) that were expanded, with size 1 again."""
    for axis in range(tensor.dim() - 2):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def check_blocks(block_q: int, block_k: int) -> None:
    """Refuse sizes that cut nothing.

    Raises:
        UsageError: a size is not positive.
    """
    if block_q < 1 or block_k < 1:
        raise UsageError(
            f"A tile of {block_q} × {block_k} elements is none: block_q and block_k must be positive."
        )


def _folded(mask: Tensor, axis: int, block: int, *, any_of: bool) -> Tensor:
    """Any or all of each `block` elements along an axis; beyond the end there is nothing to see."""
    size = mask.shape[axis]
    whole = size // block * block
    tiles = mask.narrow(axis, 0, whole).unflatten(axis, (size // block, block))
    parts = [tiles.any(axis + 1) if any_of else tiles.all(axis + 1)]
    if whole < size:
        rest = mask.narrow(axis, whole, size - whole).any(axis, keepdim=True)
        parts.append(rest if any_of else torch.zeros_like(rest))
    return torch.cat(parts, axis)


def _listed(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Count and ascending columns of the True entries of each row, zeros beyond the count; int32."""
    count = grid.sum(-1, dtype=torch.int32)
    order = torch.argsort(grid.to(torch.uint8), dim=-1, descending=True, stable=True).to(torch.int32)
    beyond = torch.arange(grid.shape[-1], device=grid.device) >= count.unsqueeze(-1)
    return count, order.masked_fill(beyond, 0).contiguous()


def _grid(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """The bool grid [B, H, nq, columns] that a list came from."""
    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    grid = torch.zeros((*index.shape[:-1], columns + 1), dtype=torch.bool, device=index.device)
    # what is not listed lands in a column that is cut off
    target = torch.where(listed, index, columns).to(torch.int64)
    return grid.scatter_(-1, target, torch.ones_like(target, dtype=torch.bool))[..., :columns]
