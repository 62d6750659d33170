"""A linear layer under a pattern, held and run as blocks: only the active ones have memory, gradients and
moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from effcompile.sparse.layer import BlockSparseLinear, carry
from effcompile.sparse.moments import Change
from effcompile.sparse.movement import Movement
from effcompile.sparse.pattern import BlockPattern

__all__ = ["BlockWeight"]


class BlockWeight:
    """The values (capacity, b, b) of a BlockSparseLinear, moved as the pattern moves.

    See `held.Held` for what the methods do.
    """

    execution = "blocks"

    def __init__(self, name: str, layer: BlockSparseLinear) -> None:
        self.name, self.layer = name, layer
        self.block, self.shape = layer.block, (layer.out_features, layer.in_features)
        self.dense_gradient: Tensor | None = None
        self._watching: Any = None

    @property
    def mask(self) -> Tensor:
        """The layer's own pattern: a state dict loaded into it brings its own."""
        return self.layer.pattern().blocks().cpu()

    @property
    def parameter(self) -> nn.Parameter:
        return self.layer.values

    @property
    def room(self) -> int:
        return self.layer.capacity

    def scores(self) -> Tensor:
        pattern, values = self.layer.pattern().to("cpu"), self.layer.values.detach()
        found = torch.zeros(self.shape[0] // self.block, self.shape[1] // self.block)
        found[pattern.block_rows(), pattern.col.long()] = (
            values[: pattern.nnz].abs().float().sum(dim=(1, 2)).cpu()
        )
        return found

    def dense(self) -> Tensor:
        return self.layer.dense().weight.detach()

    @torch.no_grad()
    def move(self, movement: Movement) -> Change:
        pattern = BlockPattern.from_blocks(movement.mask, self.block)
        places = self.layer.set_pattern(pattern)
        # new ones, and those that just went
        back = movement.grown[pattern.block_rows(), pattern.col.long()].nonzero().squeeze(1)
        places[back.to(places.device)] = -1
        self.layer.values[back.to(places.device)] = 0

        def change(tensor: Tensor, begins: float) -> None:
            moved = carry(tensor, places)
            if begins:
                moved[places < 0] = begins
            tensor.copy_(moved)

        return change

    @torch.no_grad()
    def set_mask(self, mask: Tensor) -> None:
        pattern = BlockPattern.from_blocks(mask.cpu(), self.block)
        if pattern == self.layer.pattern().to("cpu"):
            return
        values = self.layer.values.clone()
        self.layer.set_pattern(pattern)
        self.layer.values.copy_(values)

    def enforce(self) -> None:
        """Nothing lies outside."""

    def release(self) -> None:
        self.collect(False)

    def collect(self, on: bool) -> None:
        """The layer computes the gradient of active blocks only: the dense one is made here, from its input
        and its output's gradient.
        """
        self.dense_gradient = None
        if on and self._watching is None:
            self._watching = self.layer.register_forward_hook(self._watch)
        elif not on and self._watching is not None:
            self._watching.remove()
            self._watching = None

    def _watch(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        x = inputs[0].detach()

        def add(gradient: Tensor) -> None:
            found = gradient.reshape(-1, gradient.shape[-1]).float().T @ x.reshape(-1, x.shape[-1]).float()
            self.dense_gradient = found if self.dense_gradient is None else self.dense_gradient + found

        output.register_hook(add)
