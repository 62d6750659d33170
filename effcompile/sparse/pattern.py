"""Which blocks of a weight are kept: block-sparse rows, and the same by columns for the transposed product.

Legend: weight W (N, K) = (rows, cols), block b, block rows R = N/b, block columns C = K/b, kept blocks Z.
Values are (Z, b, b) in the order of `col`: row by row, columns ascending.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.block_sparse_native import BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPattern:
    """The kept blocks of an (N, K) weight.

    Make one with `from_blocks`, `from_mask`, `from_dense`, `from_indices` or `random`.

    Attributes:
        rows, cols: N and K, in elements.
        block: b, one of BLOCKS; divides both.
        crow: (R + 1) int32; the blocks of block row i are crow[i] to crow[i + 1].
        col: (Z) int32; their block columns, ascending within a row.
        ccol: (C + 1) int32; the same by columns: the blocks of block column j are ccol[j] to ccol[j + 1] of
            `row` and `perm`.
        row: (Z) int32; their block rows, ascending within a column.
        perm: (Z) int32; their places in `col`, and so in the values.
    """

    rows: int
    cols: int
    block: int
    crow: Tensor
    col: Tensor
    ccol: Tensor
    row: Tensor
    perm: Tensor

    @classmethod
    def from_indices(cls, rows: int, cols: int, block: int, crow: Tensor, col: Tensor) -> BlockPattern:
        """From block-sparse-row indices, as torch.Tensor.crow_indices() and col_indices() give them.

        Raises:
            UsageError: the block is not one of BLOCKS or does not divide the weight; the indices do not fit
                it, or repeat a block.
        """
        check_block(rows, cols, block)
        crow, col = crow.to(torch.int32).contiguous(), col.to(torch.int32).contiguous()
        _check_indices(crow, col, rows // block, cols // block)
        row_of = torch.repeat_interleave(torch.arange(rows // block, device=col.device), crow.diff().long())
        return cls(
            rows=rows,
            cols=cols,
            block=block,
            crow=crow,
            col=col,
            **transposed_indices(row_of, col, cols // block),
        )

    @classmethod
    def from_blocks(cls, kept: Tensor, block: int) -> BlockPattern:
        """From a Boolean (R, C) tensor: one entry per block.

        Raises:
            UsageError: another tensor.
        """
        if kept.dim() != 2 or kept.dtype != torch.bool:
            raise UsageError(
                f"A pattern of blocks is a 2-d Boolean tensor; given {kept.dim()}-d {kept.dtype}."
            )
        crow = torch.zeros(kept.shape[0] + 1, dtype=torch.int64, device=kept.device)
        crow[1:] = kept.sum(1).cumsum(0)
        return cls.from_indices(
            kept.shape[0] * block, kept.shape[1] * block, block, crow, kept.nonzero()[:, 1]
        )

    @classmethod
    def from_mask(cls, mask: Tensor, block: int) -> BlockPattern:
        """From an (N, K) mask, Boolean or numbers: every block that has an entry other than 0 is kept, whole.

        Raises:
            UsageError: another number of axes.
        """
        if mask.dim() != 2:
            raise UsageError(f"The mask of a linear weight has 2 axes; given {tuple(mask.shape)}.")
        check_block(mask.shape[0], mask.shape[1], block)
        return cls.from_blocks(_as_blocks(mask != 0, block).flatten(2).any(2), block)

    @classmethod
    def from_dense(cls, weight: Tensor, block: int) -> tuple[BlockPattern, Tensor]:
        """(pattern, values) of a weight's blocks that are not all 0."""
        pattern = cls.from_mask(weight.detach(), block)
        return pattern, pattern.values_of(weight)

    @classmethod
    def random(
        cls, rows: int, cols: int, block: int, sparsity: float, generator: torch.Generator | None = None
    ) -> BlockPattern:
        """round((1 − sparsity)·R·C) blocks at random places.

        Raises:
            UsageError: a sparsity outside [0, 1), or blocks that do not fit.
        """
        if not 0 <= sparsity < 1:
            raise UsageError(f"A sparsity is the share of blocks that are 0, in [0, 1); given {sparsity}.")
        check_block(rows, cols, block)
        total = (rows // block) * (cols // block)
        kept = torch.zeros(total, dtype=torch.bool)
        kept[torch.randperm(total, generator=generator)[: round(total * (1 - sparsity))]] = True
        return cls.from_blocks(kept.view(rows // block, cols // block), block)

    @property
    def nnz(self) -> int:
        """Kept blocks, Z."""
        return int(self.col.shape[0])

    @property
    def density(self) -> float:
        """Kept share of the weight."""
        return self.nnz * self.block**2 / (self.rows * self.cols)

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(crow, col, ccol, row, perm): what `effcompile::block_sparse_linear` takes after the values."""
        return self.crow, self.col, self.ccol, self.row, self.perm

    def blocks(self) -> Tensor:
        """The Boolean (R, C) tensor of kept blocks."""
        kept = torch.zeros(
            self.rows // self.block, self.cols // self.block, dtype=torch.bool, device=self.col.device
        )
        kept[self.block_rows(), self.col.long()] = True
        return kept

    def block_rows(self) -> Tensor:
        """(Z) int64: the block row of each kept block, in the order of `col`."""
        return torch.repeat_interleave(
            torch.arange(self.rows // self.block, device=self.col.device), self.crow.diff().long()
        )

    def mask(self) -> Tensor:
        """The Boolean (N, K) tensor of kept entries."""
        return self.blocks().repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)

    def values_of(self, weight: Tensor) -> Tensor:
        """(Z, b, b): a weight's kept blocks.

        Raises:
            UsageError: the weight has another shape.
        """
        if weight.shape != (self.rows, self.cols):
            of = f"({self.rows}, {self.cols})"
            raise UsageError(
                f"The pattern is of a weight {of}; given {tuple(weight.shape)}: a mask for another model?"
            )
        return _as_blocks(weight, self.block)[self.block_rows(), self.col.long()].contiguous()

    def to_dense(self, values: Tensor) -> Tensor:
        """(N, K): the weight, 0 where nothing is kept.

        Raises:
            UsageError: the values do not fit the pattern.
        """
        if values.shape != (self.nnz, self.block, self.block):
            raise UsageError(
                f"The pattern's values are ({self.nnz}, {self.block}, {self.block}); given "
                f"{tuple(values.shape)}."
            )
        blocks = values.new_zeros(self.rows // self.block, self.cols // self.block, self.block, self.block)
        blocks = blocks.index_put((self.block_rows(), self.col.long()), values)
        return blocks.permute(0, 2, 1, 3).reshape(self.rows, self.cols)

    def transposed(self) -> BlockPattern:
        """The pattern of Wᵀ. Its values are `values[pattern.perm].transpose(1, 2)`."""
        return BlockPattern.from_indices(self.cols, self.rows, self.block, self.ccol, self.row)

    def places_in(self, other: BlockPattern) -> Tensor:
        """(Z) int64: for each block kept here, its place among the other's values, or −1: what moves values
        and moments along.

        Raises:
            UsageError: the other is of another weight or block size.
        """
        if (self.rows, self.cols, self.block) != (other.rows, other.cols, other.block):
            raise UsageError(
                f"Patterns of one weight and block size can be compared; given {self} and {other}."
            )
        places = torch.full((self.rows // self.block, self.cols // self.block), -1, device=self.col.device)
        places[other.block_rows(), other.col.long()] = torch.arange(other.nnz, device=self.col.device)
        return places[self.block_rows(), self.col.long()]

    def to(self, device: torch.device | str) -> BlockPattern:
        """The same pattern with its indices on a device."""
        return replace(
            self, **{name: getattr(self, name).to(device) for name in ("crow", "col", "ccol", "row", "perm")}
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockPattern)
            and (self.rows, self.cols, self.block) == (other.rows, other.cols, other.block)
            and torch.equal(self.crow, other.crow)
            and torch.equal(self.col, other.col)
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.nnz} blocks of {self.block} ({self.density:.1%} kept)"


def transposed_indices(row_of: Tensor, col: Tensor, block_cols: int) -> dict[str, Tensor]:
    """ccol, row and perm of BlockPattern, from the block row (Z) and block column (Z) of each block in the
    order of its values.
    """
    perm = torch.sort(col.long() * (int(row_of.max()) + 1 if row_of.numel() else 1) + row_of).indices
    ccol = torch.zeros(block_cols + 1, dtype=torch.int64, device=col.device)
    ccol[1:] = torch.bincount(col.long(), minlength=block_cols).cumsum(0)
    return {"ccol": ccol.int(), "row": row_of[perm].int(), "perm": perm.int()}


def check_block(rows: int, cols: int, block: int) -> None:
    """Raises UsageError when there are no kernels for the block size, or it does not divide both axes of the
    weight.
    """
    if block not in BLOCKS:
        raise UsageError(f"A block is one of {', '.join(map(str, BLOCKS))}; given {block}.")
    if rows < 1 or cols < 1:
        raise UsageError(f"A block-sparse weight has rows and columns; given ({rows}, {cols}).")
    if rows % block or cols % block:
        fitting = ", ".join(
            str(b) for b in sorted(BLOCKS, key=lambda b: abs(b - block)) if rows % b == 0 and cols % b == 0
        )
        padded = f"({-(-rows // block) * block}, {-(-cols // block) * block})"
        raise UsageError(
            f"Blocks of {block} do not divide a weight ({rows}, {cols}). Those that do, nearest first: "
            f"{fitting}. Or pad the weight to {padded}."
        )


def _check_indices(crow: Tensor, col: Tensor, block_rows: int, block_cols: int) -> None:
    of = f"{block_rows} block rows and {block_cols} block columns"
    if crow.shape != (block_rows + 1,) or col.dim() != 1:
        shapes = f"{tuple(crow.shape)}, with columns {tuple(col.shape)}"
        raise UsageError(f"A pattern of {of} has {block_rows + 1} row pointers; given {shapes}.")
    if int(crow[0]) != 0 or int(crow[-1]) != col.shape[0] or bool((crow.diff() < 0).any()):
        raise UsageError(
            f"The row pointers must ascend from 0 to the {col.shape[0]} column indices; they run from "
            f"{int(crow[0])} to {int(crow[-1])}."
        )
    if col.numel() and (int(col.min()) < 0 or int(col.max()) >= block_cols):
        raise UsageError(
            f"A pattern of {of} has column indices from 0 to {block_cols - 1}; given {int(col.min())} to "
            f"{int(col.max())}."
        )
    same_row = torch.ones_like(col, dtype=torch.bool)
    same_row[crow[:-1].long()[crow[:-1] < col.shape[0]]] = False
    if bool(((col.diff() <= 0) & same_row[1:]).any()):
        raise UsageError("The column indices of a row must ascend, each block once.")


def _as_blocks(weight: Tensor, block: int) -> Tensor:
    """(R, C, b, b): a view of a weight."""
    return weight.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
