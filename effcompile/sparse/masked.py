"""A linear layer under a pattern, run dense: weight, gradient and moments are zero outside the pattern.

This is exact and works with every layer, optimizer and compiler, and saves nothing: the dense product is
computed. `blocks.py` is the other way of holding a weight.
"""

from __future__ import annotations

from torch import Tensor, nn

from effcompile.sparse import saliency
from effcompile.sparse.moments import Change
from effcompile.sparse.movement import Movement

__all__ = ["MaskedWeight"]


class MaskedWeight:
    """The weight (O, I) of a linear layer, of which blocks of a grid (R, C) are active.

    See `held.Held` for what the methods do.
    """

    execution = "masked"

    def __init__(self, name: str, layer: nn.Linear, block: int, mask: Tensor, room: int) -> None:
        self.name, self.block, self.layer, self.room = name, block, layer, room
        self.shape = (layer.out_features, layer.in_features)
        self.mask = mask.cpu()
        self.dense_gradient: Tensor | None = None
        self._collecting = False
        self._outside = self._expand(~mask)
        self._hook = layer.weight.register_hook(self._sparse_gradient)

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer holds."""
        weight = self.layer.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def dense(self) -> Tensor:
        """The whole weight, (O, I)."""
        return self.layer.weight.detach()

    def collect(self, on: bool) -> None:
        """From now on, sum the dense gradient in `dense_gradient`, (O, I); off: forget it."""
        self._collecting, self.dense_gradient = on, None

    def move(self, movement: Movement) -> Change:
        """Take the new pattern, the weight with it; the change that moments must undergo is returned."""
        self.set_mask(movement.mask)
        new = self._expand(~movement.kept)  # outside the pattern, or fresh in it

        def change(tensor: Tensor, begins: float) -> None:
            tensor.masked_fill_(new.to(tensor.device), begins)

        change(self.parameter.data, 0.0)
        return change

    def set_mask(self, mask: Tensor) -> None:
        """Take a pattern, in place: what was compiled on this tensor stays valid.

        The weight is not touched.
        """
        self.mask = mask.cpu()
        self._outside.copy_(self._expand(~mask))

    def enforce(self) -> None:
        """Zero what lies outside the pattern: optimizers that mix entries (Muon), or decay towards something,
        write there.
        """
        self.parameter.data.masked_fill_(self._there(self.parameter), 0.0)

    def release(self) -> None:
        """Let go of the layer: its gradient is dense again."""
        self._hook.remove()

    def _sparse_gradient(self, gradient: Tensor) -> Tensor:
        if self._collecting:
            found = gradient.detach().float()
            self.dense_gradient = (
                found.clone() if self.dense_gradient is None else self.dense_gradient + found
            )
        return gradient.masked_fill(self._there(gradient), 0.0)

    def _there(self, tensor: Tensor) -> Tensor:
        """The elements outside, on the device of the tensor: models move after they were wrapped."""
        if self._outside.device != tensor.device:
            self._outside = self._outside.to(tensor.device)
        return self._outside

    def _expand(self, grid: Tensor) -> Tensor:
        elements = (
            grid.to(self.layer.weight.device)
            .repeat_interleave(self.block, 0)
            .repeat_interleave(self.block, 1)
        )
        return elements.contiguous()

    def scores(self) -> Tensor:
        """The L1 norm of every block, (R, C), on the CPU."""
        return saliency.blocks(saliency.magnitude(self.dense()).float(), self.block).cpu()
