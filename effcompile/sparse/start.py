"""The first pattern of a sparse training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.sparse import saliency
from effcompile.sparse.recipe import Recipe

__all__ = ["first_masks"]


def first_masks(
    layers: Mapping[str, nn.Linear],
    initial: str | Mapping[str, Tensor],
    recipe: Recipe,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The active blocks of every layer, bool (R, C) on the CPU: at random, the largest, all, or as given.

    Raises:
        UsageError: masks of other layers than these, or of other shapes.
    """
    block, shapes = (
        recipe.block,
        {name: (layer.out_features, layer.in_features) for name, layer in layers.items()},
    )
    grids = {name: (shape[0] // block, shape[1] // block) for name, shape in shapes.items()}
    if isinstance(initial, Mapping):
        if initial.keys() != shapes.keys():
            differ = ", ".join(sorted(initial.keys() ^ shapes.keys())[:4])
            raise UsageError(
                f"initial must hold a mask for every sparse layer and no other; differing: {differ}. "
                "Masks of another model?"
            )
        return {
            name: saliency.given(name, initial[name].cpu(), shape, block) for name, shape in shapes.items()
        }
    if initial == "dense":
        return {name: torch.ones(grid, dtype=torch.bool) for name, grid in grids.items()}
    if initial == "magnitude":
        scores = {
            name: saliency.blocks(saliency.magnitude(layer.weight).float(), block).cpu()
            for name, layer in layers.items()
        }
    else:
        scores = {name: torch.rand(grid, generator=generator) for name, grid in grids.items()}
    return saliency.masks(scores, recipe.sparsity, recipe.distribution, recipe.balanced)
