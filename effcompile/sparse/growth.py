"""Which blocks of a sparse weight come first when the pattern moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.sparse import saliency
from effcompile.sparse.held import Held
from effcompile.sparse.recipe import Recipe


def growth_keys(layers: Sequence[Held], recipe: Recipe, generator: torch.Generator) -> dict[str, Tensor]:
    """A key for every block (O / b, I / b) of every layer: those of the largest come.

    At random, or by the dense gradient.

    Raises:
        UsageError: by gradient, and there was no backward that was collected.
    """
    if recipe.growth == "random":
        return {held.name: torch.rand(held.mask.shape, generator=generator) for held in layers}
    missing = [held.name for held in layers if held.dense_gradient is None]
    if missing:
        raise UsageError(
            f"growth='gradient' found no dense gradient of {missing[0]!r}: there was no backward before this "
            "update. Call step() after every optimizer.step(), and update() only through it. Under "
            "torch.compile make the controller with execution='masked'."
        )
    gradients = {held.name: held.dense_gradient for held in layers}
    return {
        name: saliency.blocks(_mean_over_ranks(g).abs(), recipe.block).cpu()
        for name, g in gradients.items()
        if g is not None
    }


def _mean_over_ranks(gradient: Tensor) -> Tensor:
    """That of all examples: data-parallel ranks have some each."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return gradient
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()
