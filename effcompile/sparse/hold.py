"""How a layer under a pattern is held: as blocks where kernels run them here, else dense under a mask; and
back to a plain linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.ops.block_sparse import fallback_reason
from effcompile.ops.block_sparse_native import BLOCKS
from effcompile.sparse import moments
from effcompile.sparse.blocks import BlockWeight
from effcompile.sparse.held import Held
from effcompile.sparse.layer import BlockSparseLinear
from effcompile.sparse.masked import MaskedWeight
from effcompile.sparse.movement import Movement
from effcompile.sparse.pattern import BlockPattern
from effcompile.sparse.recipe import Recipe

__all__ = ["check", "hold", "release"]

#: Layers that compete for blocks (distribution="global") can grow to so many times their first number.
_SLACK = 1.5


def check(optimizer: Optimizer, layers: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    """Raise UsageError when execution="blocks" is asked for a layer that cannot be held so."""
    for name, layer in layers.items():
        refused = _no_blocks(layer, optimizer, recipe)
        if recipe.execution == "blocks" and refused:
            raise UsageError(
                f"{name!r} cannot be held as blocks: {refused}. Use execution='masked' or 'auto'."
            )


def hold(
    model: nn.Module, optimizer: Optimizer, name: str, layer: nn.Linear, mask: Tensor, recipe: Recipe
) -> Held:
    """Put a linear layer of the model, and the optimizer's moments of it, under a pattern of
    blocks (R, C).
    """
    active = int(mask.sum())
    room = min(mask.numel(), int(active * _SLACK) + 1) if recipe.distribution == "global" else active
    if recipe.execution == "masked" or _no_blocks(layer, optimizer, recipe) or _no_gain(layer, recipe):
        held = MaskedWeight(name, layer, recipe.block, mask, room)
        moments.edit(optimizer, layer.weight, held.move(Movement(kept=mask, grown=torch.zeros_like(mask))))
        return held
    pattern = BlockPattern.from_blocks(mask, recipe.block).to(layer.weight.device)
    sparse = BlockSparseLinear.from_linear(layer, pattern, capacity=room)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    moments.replace(optimizer, weight, sparse.values, lambda tensor: _padded(pattern.values_of(tensor), room))
    _swap(model, name, sparse.train(layer.training))
    return BlockWeight(name, sparse)


def release(model: nn.Module, optimizer: Optimizer, held: Held) -> None:
    """Make the layer a plain nn.Linear again, zeros filled in, in the model and in the optimizer's state."""
    held.release()
    sparse = held.layer
    if isinstance(sparse, BlockSparseLinear):
        linear, pattern = sparse.dense().train(sparse.training), sparse.pattern()
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        moments.replace(
            optimizer, sparse.values, weight, lambda tensor: pattern.to_dense(tensor[: pattern.nnz])
        )
        _swap(model, held.name, linear)


def _no_blocks(layer: nn.Linear, optimizer: Optimizer, recipe: Recipe) -> str | None:
    """Why a layer cannot be held as blocks; None when it can."""
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, whose forward is not that of nn.Linear"
    if recipe.block not in BLOCKS:
        return f"blocks are {', '.join(map(str, BLOCKS))}, not {recipe.block}"
    if type(optimizer).__name__ == "Muon":
        return "Muon takes matrices only, and blocks are stacked in three dimensions"
    return None


def _no_gain(layer: nn.Linear, recipe: Recipe) -> bool:
    """With execution="auto": whether blocks would only be slower, for want of kernels here or because most of
    them are there.
    """
    if recipe.execution == "blocks":
        return False
    probe = torch.empty(1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    return (
        recipe.initial == "dense" or recipe.sparsity < 0.5 or fallback_reason(probe, recipe.block) is not None
    )


def _swap(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _padded(tensor: Tensor, capacity: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(capacity - len(tensor), *tensor.shape[1:])])
