"""A linear layer that stores and computes only the kept blocks of its weight; the pattern may change while it
trains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.sparse.pattern import BlockPattern

_INDICES = ("crow", "col", "ccol", "row", "perm")


class BlockSparseLinear(nn.Module):
    """y (..., N) = x (..., K) Wᵀ + bias, with W (N, K) 0 outside a BlockPattern.

    `values` (Z, b, b) is the parameter. The pattern's indices are buffers: `set_pattern` writes into them, so
    that compiled code, exported programs and training plans go on as they are. A state dict holds `crow` and
    `col`; the rest follows from them.
    """

    values: nn.Parameter
    crow: Tensor
    col: Tensor
    ccol: Tensor
    row: Tensor
    perm: Tensor

    def __init__(
        self,
        pattern: BlockPattern,
        values: Tensor,
        bias: Tensor | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        """Values (Z, b, b) in the order of the pattern.

        Args:
            pattern: the kept blocks.
            values: becomes a parameter; copied when the capacity is larger than the pattern.
            bias: (N), becomes a parameter; a Parameter is taken as it is.
            capacity: blocks that there is memory for, at least the pattern's; more leaves room for larger
                patterns.

        Raises:
            UsageError: values, bias or capacity that do not fit the pattern.
        """
        super().__init__()
        self.in_features, self.out_features, self.block = pattern.cols, pattern.rows, pattern.block
        capacity = pattern.nnz if capacity is None else capacity
        if capacity < pattern.nnz:
            raise UsageError(
                f"A capacity of {capacity} blocks is less than the pattern's {pattern.nnz} ({pattern})."
            )
        if values.shape != (pattern.nnz, pattern.block, pattern.block):
            wanted = (pattern.nnz, pattern.block, pattern.block)
            raise UsageError(f"The values of this pattern are {wanted}; given {tuple(values.shape)}.")
        if bias is not None and bias.shape != (pattern.rows,):
            raise UsageError(
                f"The bias has one entry per output, ({pattern.rows}); given {tuple(bias.shape)}."
            )
        self.values = nn.Parameter(_padded(values.detach(), capacity))
        self.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias.detach())
        for name, index in zip(_INDICES, pattern.indices, strict=True):
            held = _padded(index, len(index) if name in ("crow", "ccol") else capacity)
            self.register_buffer(name, held.to(values.device), persistent=name in ("crow", "col"))
        self.register_load_state_dict_post_hook(_follow)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, pattern: BlockPattern, *, capacity: int | None = None
    ) -> BlockSparseLinear:
        """The blocks of a linear that a pattern keeps (`BlockPattern.from_mask`).

        Its bias is shared, its weight copied.

        Raises:
            UsageError: the weight is not a plain floating-point tensor, or the pattern is of another shape.
        """
        weight = linear.weight
        if type(weight.data) is not Tensor or not weight.is_floating_point():
            kind = f"{type(weight.data).__name__} of {weight.dtype}"
            raise UsageError(
                f"A block-sparse linear is made of a plain floating-point weight; given {kind}: sparsify "
                "before quantising."
            )
        layer = cls(
            pattern, pattern.to(weight.device).values_of(weight.detach()), linear.bias, capacity=capacity
        )
        layer.values.requires_grad_(weight.requires_grad)
        return layer.train(linear.training)

    @property
    def capacity(self) -> int:
        """Blocks that there is memory for."""
        return int(self.values.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) → (..., N). Under autocast in its dtype, like nn.Linear."""
        values: Tensor = self.values
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, values, bias = x.to(dtype), values.to(dtype), bias if bias is None else bias.to(dtype)
        return block_sparse_linear(x, values, self.crow, self.col, self.ccol, self.row, self.perm, bias)

    def pattern(self) -> BlockPattern:
        """The pattern in use, a copy."""
        used = int(self.crow[-1])
        return BlockPattern.from_indices(
            self.out_features, self.in_features, self.block, self.crow.clone(), self.col[:used].clone()
        )

    @torch.no_grad()
    def set_pattern(self, pattern: BlockPattern) -> Tensor:
        """Take another pattern of at most `capacity` blocks: those kept carry their values along, new ones
        start at 0.

        Returns:
            (capacity) int64: for each place of the new values its place among the old ones, −1 for new and
            unused places: what carries an optimizer's moments along (`carry`).

        Raises:
            UsageError: a pattern of another weight or block size, or too many blocks.
        """
        if pattern.nnz > self.capacity:
            room = f"this layer has memory for {self.capacity}"
            raise UsageError(f"The pattern keeps {pattern.nnz} blocks; {room}. Give it a larger capacity=.")
        pattern = pattern.to(self.col.device)
        places = _padded(pattern.places_in(self.pattern()) + 1, self.capacity) - 1
        self.values.copy_(carry(self.values, places))
        for name, index in zip(_INDICES, pattern.indices, strict=True):
            getattr(self, name).copy_(_padded(index, len(getattr(self, name))))
        return places

    @torch.no_grad()
    def dense(self) -> nn.Linear:
        """The nn.Linear with the same weight, zeros filled in. Shares the bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        pattern = self.pattern()
        linear.weight = nn.Parameter(
            pattern.to_dense(self.values[: pattern.nnz]), requires_grad=self.values.requires_grad
        )
        linear.bias = self.bias  # type: ignore[assignment]
        return linear

    def extra_repr(self) -> str:
        used = int(self.crow[-1]) if not self.crow.is_meta else self.capacity
        kept = used * self.block**2 / (self.in_features * self.out_features)
        room = f", capacity={self.capacity}" if self.capacity > used else ""
        return (
            f"{self.in_features}, {self.out_features}, block={self.block}, kept={kept:.1%}{room}, "
            f"bias={self.bias is not None}"
        )


def carry(stored: Tensor, places: Tensor) -> Tensor:
    """(capacity, ...): values or moments moved to the places that `set_pattern` returned, 0 where a block is
    new.
    """
    moved = stored[places.clamp(min=0)] if len(stored) else stored.clone()
    return moved.masked_fill_((places < 0).view(-1, *(1,) * (stored.dim() - 1)), 0)


def _padded(given: Tensor, size: int) -> Tensor:
    """The first axis filled up with zeros; always a tensor of its own."""
    return torch.cat([given, given.new_zeros(size - len(given), *given.shape[1:])])


def _follow(layer: nn.Module, _: object) -> None:
    """After loading a state dict: check its pattern and derive the transposed one from it."""
    assert isinstance(layer, BlockSparseLinear)
    if layer.crow.is_meta:
        return
    for name, index in zip(_INDICES, layer.pattern().indices, strict=True):
        stored = getattr(layer, name)
        stored.copy_(_padded(index.to(stored.device), len(stored)))
